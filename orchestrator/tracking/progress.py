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
    "reward/first_error": "reward failed:",
}
EVAL_SHOWN = {"eval/reward/mean": "reward", "eval/version": "version", "eval/error": "failed:"}
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


class EvalTracker:
    """Prints every evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        words = ["   eval", f"after {step} rollouts", *_shown(metrics, EVAL_SHOWN)]
        self._console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        return


def line(step: int, num_rollout: int, metrics: Mapping[str, Any]) -> str:
    """The line of one step: `rollout   3/40  reward 0.412  loss -0.0132 ...`."""
    width = len(str(num_rollout))
    return "  ".join([f"rollout {step + 1:>{width}}/{num_rollout}", *_shown(metrics, SHOWN)])


def _shown(metrics: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    words = []
    for key, name in names.items():
        value = plain(metrics[key]) if key in metrics else None
        if value is not None:
            words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return words
