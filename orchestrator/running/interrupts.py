"""SIGTERM as an exception, so that `finally` runs as it does for Ctrl-C; and as a request to save first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """The process was asked to end. Not an Exception: nothing that recovers from errors may swallow it."""


class StopAsked(Terminated):
    """The run was asked to end, at a point where it can still save."""


class Stop:
    """What SIGTERM means while a run is under way.

    The first one asks it to end at its next safe point: `check` and `interruptible` raise `StopAsked` there. A second
    one, or `deadline_s` seconds after the first, raises `Terminated` wherever the main thread is. With a deadline of 0
    the first does.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._asked = False
        self._why = "SIGTERM"
        self._may_raise = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGALRM of this process are handled here. In the main thread."""
        alarm = signal.signal(signal.SIGALRM, self._on_alarm)
        terminate = signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGTERM, terminate)
            signal.signal(signal.SIGALRM, alarm)

    @property
    def asked(self) -> bool:
        return self._asked

    def check(self) -> None:
        """Raise `StopAsked` if the run was asked to end."""
        if self._asked:
            raise StopAsked(self._why)

    def ask(self, why: str, within_s: float) -> None:
        """What the first SIGTERM does, from another thread; for a reason of our own, and with at most `within_s`."""
        if not self._asked:
            self._why, self._deadline_s = why, min(self._deadline_s, within_s)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, `StopAsked` is raised as soon as the run is asked to end, also out of a wait."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        if self._asked or self._deadline_s == 0:
            raise Terminated("SIGTERM")
        self._asked = True
        signal.setitimer(signal.ITIMER_REAL, self._deadline_s)
        if self._may_raise:
            raise StopAsked(self._why)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        raise Terminated(
            f"{self._why}; the step that was under way and its save did not end within {self._deadline_s:g} s "
            "(checkpoint.stop_deadline_s)"
        )


def raise_on_sigterm() -> None:
    """Raise `Terminated` in the main thread at SIGTERM. Call it again after `ray.init()`, which installs its own."""
    signal.signal(signal.SIGTERM, _raise)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Terminated("SIGTERM")
