"""A run as a job of a Ray cluster."""
