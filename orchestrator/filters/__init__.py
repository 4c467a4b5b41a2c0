"""Filters of groups by name or import path."""
