"""A tracker that may fail without harm to the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

from orchestrator.tracking.base import Tracker


class Tolerant:
    """Opens a tracker and passes on to it. What it raises is counted; the first failure and the count are said.

    `close` may be called again. It waits `close_timeout_s` at most: a tracker that waits for its server is left behind.
    """

    def __init__(
        self, name: str, opener: Callable[[], Tracker], say: Callable[[str], None], close_timeout_s: float = 30.0
    ) -> None:
        self._name, self._say, self._close_timeout_s = name, say, close_timeout_s
        self.failures = 0
        self._inner: Tracker | None = None
        self._closed = False
        try:
            self._inner = opener()
        except Exception as error:
            self._failed("cannot be opened; the run goes on without it", error)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._inner is None:
            self.failures += 1
            return
        try:
            self._inner.log(step, metrics)
        except Exception as error:
            self._failed(f"failed at step {step}; the run goes on, and further failures are only counted", error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._inner is not None:
            closing = Thread(target=self._close, args=(self._inner,), daemon=True)
            closing.start()
            closing.join(self._close_timeout_s)
            if closing.is_alive():
                self._failed("is left behind", TimeoutError(f"not closed within {self._close_timeout_s:g} s"))
        if self.failures:
            self._say(f"warning: {self._name} failed {self.failures} times in this run")

    def _close(self, inner: Tracker) -> None:
        try:
            inner.close()
        except Exception as error:
            self._failed("failed to close", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            self._say(f"warning: {self._name} {what}: {type(error).__name__}: {error}")
