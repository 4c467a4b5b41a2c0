"""What can go wrong, by the exit code it leads to."""

from __future__ import annotations


class SlotwiseError(Exception):
    """Base of every error that Slotwise raises on purpose: its text says what is wrong, where, and what would work."""


class ResumeError(SlotwiseError):
    """What was asked to be loaded cannot be, or not without guessing (exit 3)."""


class InvariantViolation(SlotwiseError):
    """A promise about slots would have been broken, so the work was refused (exit 4)."""
