"""SIGTERM as an exception, so that `finally` runs as it does for Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(BaseException):
    """The process was asked to end. Not an Exception: nothing that recovers from errors may swallow it."""


def raise_on_sigterm() -> None:
    """Raise `Terminated` in the main thread at SIGTERM. Call it again after `ray.init()`, which installs its own."""
    signal.signal(signal.SIGTERM, _raise)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Terminated("SIGTERM")
