"""Where metrics go."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes the metrics of one rollout step at a time."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def plain(value: Any) -> Any:
    """`value` as JSON can carry it: not-a-number and infinities become None, numbers of other libraries Python's."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} is no metric: {value!r}")


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers. What was not measured is left out, never zero."""
    found = {name: plain(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
