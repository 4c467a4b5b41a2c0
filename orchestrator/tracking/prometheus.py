"""Metrics of each rollout for Prometheus, through Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.metric_names import of_step
from workers.metrics import MetricSink


class PrometheusTracker:
    """Passes the headline metrics to a sink, whose owner closes it."""

    def __init__(self, run: str, sink: MetricSink) -> None:
        self._run, self._sink = run, sink

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._sink.take(of_step(self._run, metrics))

    def close(self) -> None:
        return
