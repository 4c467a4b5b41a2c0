"""Rewards by name or import path."""
