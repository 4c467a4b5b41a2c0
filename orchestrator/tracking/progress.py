"""A line per rollout step for the terminal, under it a bar where there is a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orchestrator.tracking.base import plain

SHOWN = {
    "reward/mean": "reward",
    "train/loss": "loss",
    "train/kl_loss": "kl",
    "train/entropy": "entropy",
    "train/grad_norm": "grad",
    "weights/version": "version",
    "perf/step_s": "s",
    "eval/reward/mean": "eval reward",
    "reward/first_error": "reward failed:",
    "eval/error": "eval failed:",
}
"""Metrics on the line, and what they are called there; one that was not measured is not shown."""


class ProgressTracker:
    """Prints every step of `num_rollout`, of which `start_step` were done before."""

    def __init__(self, num_rollout: int, start_step: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_rollout = num_rollout
        self._bar = Progress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("rollout", total=num_rollout, completed=start_step)
        self._bar.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._console.print(line(step, self._num_rollout, metrics), highlight=False, markup=False, soft_wrap=True)
        self._bar.update(self._task, completed=step + 1)

    def close(self) -> None:
        self._bar.stop()


def line(step: int, num_rollout: int, metrics: Mapping[str, Any]) -> str:
    """The line of one step: `rollout   3/40  reward 0.412  loss -0.0132 ...`."""
    width = len(str(num_rollout))
    shown = [f"rollout {step + 1:>{width}}/{num_rollout}"]
    for key, name in SHOWN.items():
        value = plain(metrics[key]) if key in metrics else None
        if value is not None:
            shown.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(shown)
