"""Errors that decide how a run ends. Each storey adds its own beneath these bases."""

from __future__ import annotations


class SlotwiseError(Exception):
    """Base of the errors that Slotwise raises on purpose, with a message for the person who started the run."""


class InvariantViolation(SlotwiseError):
    """Weights were not what the record says, or something was about to move that must not. Ends a run at once."""


class ResumeError(SlotwiseError):
    """What a run was asked to continue from is not there, is not whole, or is somebody else's."""


class CheckpointError(SlotwiseError):
    """A checkpoint cannot be written here without damaging something that is not ours to replace."""
