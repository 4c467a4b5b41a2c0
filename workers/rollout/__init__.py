"""Rollout engines: one protocol, and one file per engine."""
