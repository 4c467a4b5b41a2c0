"""Exports metrics through Ray to Prometheus. Whatever goes wrong in here stays in here: a run does not fail over it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ray.util.metrics import Counter, Gauge

from workers.metric_names import METRICS, Metric, Update, updates

RESET_EVERY_S = 4.0
"""Ray forgets a gauge that was not set for two of its report intervals, of 10 seconds each unless configured."""

logger = logging.getLogger("slotwise")
Series = tuple[tuple[str, str], ...]


class Exported(Protocol):
    """A gauge or a counter of Ray's."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...

    def inc(self, value: float, tags: dict[str, str]) -> None: ...


def through_ray(name: str, metric: Metric) -> Any:
    kind = Gauge if metric.kind == "gauge" else Counter
    return kind(name, description=metric.about, tag_keys=metric.labels)


class MetricSink:
    """Of one process. Gauges are set again on a timer for as long as they hold."""

    def __init__(
        self,
        run: str,
        *,
        reset_every_s: float = RESET_EVERY_S,
        export: Callable[[str, Metric], Exported] = through_ray,
    ) -> None:
        self._run, self._export, self._every = run, export, reset_every_s
        self._exported: dict[str, Exported] = {}
        self._values: dict[str, dict[Series, float]] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._complained: set[str] = set()
        self._timer = threading.Thread(target=self._reset, name="slotwise-metrics", daemon=True)
        self._timer.start()

    def journaled(self, entry: Mapping[str, Any]) -> None:
        """Takes what a journal tells (`Journal.listen`)."""
        try:
            changed = updates(self._run, entry)
        except Exception as error:
            self._complain(f"a journal entry of kind {entry.get('kind')}", error)
        else:
            self.take(changed)

    def take(self, changed: Iterable[Update]) -> None:
        with self._lock:
            for update in changed:
                try:
                    self._apply(update)
                except Exception as error:
                    self._complain(update.name, error)

    def close(self) -> None:
        """No gauge is set again afterwards."""
        self._stop.set()
        self._timer.join(5.0)

    def _apply(self, update: Update) -> None:
        metric, series = METRICS[update.name], tuple(sorted(update.labels.items()))
        if metric.kind == "counter":
            self._of(update.name).inc(float(update.value or 0), dict(series))
            return
        held = self._values.setdefault(update.name, {})
        if metric.one_of is not None:
            shared = {(name, value) for name, value in series if name in metric.one_of}
            for other in [other for other in held if other != series and shared <= set(other)]:
                del held[other]
                self._of(update.name).set(0.0, dict(other))
        if update.value is None:
            held.pop(series, None)
        else:
            held[series] = float(update.value)
            self._of(update.name).set(held[series], dict(series))

    def _reset(self) -> None:
        while not self._stop.wait(self._every):
            with self._lock:
                for name, held in self._values.items():
                    for series, value in held.items():
                        try:
                            self._of(name).set(value, dict(series))
                        except Exception as error:
                            self._complain(name, error)

    def _of(self, name: str) -> Exported:
        if name not in self._exported:
            self._exported[name] = self._export(name, METRICS[name])
        return self._exported[name]

    def _complain(self, name: str, error: Exception) -> None:
        """Once for each name: what fails, fails again every few seconds."""
        if name not in self._complained:
            self._complained.add(name)
            logger.warning("%s is not exported: %s: %s", name, type(error).__name__, error)
