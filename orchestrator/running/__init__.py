"""A run and its gangs, from start to end."""
