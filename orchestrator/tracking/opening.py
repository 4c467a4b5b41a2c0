"""The trackers that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from orchestrator.batching import num_rollouts
from orchestrator.config import Config
from orchestrator.tracking.base import Tracker, Trackers
from orchestrator.tracking.jsonl import JsonlTracker
from orchestrator.tracking.progress import EvalTracker, ProgressTracker
from orchestrator.tracking.tolerant import Tolerant


def open_trackers(config: Config, start: int, run_dir: Path, console: Console) -> tuple[Tracker, Tracker]:
    """Of rollout steps, and of evaluations; they continue where the run does. No failure of a tracker gets out."""

    def tolerant(name: str, opener: Callable[[], Tracker]) -> Tracker:
        return Tolerant(name, opener, lambda text: console.print(text, markup=False, soft_wrap=True))

    both = [tolerant(name, opener) for name, opener in _services(config, start, run_dir)]
    return (
        Trackers(
            [
                tolerant("metrics.jsonl", lambda: JsonlTracker(run_dir / "metrics.jsonl", start)),
                tolerant("the progress line", lambda: ProgressTracker(num_rollouts(config), start, console)),
                *both,
            ]
        ),
        Trackers(
            [
                tolerant("eval.jsonl", lambda: JsonlTracker(run_dir / "eval.jsonl", start)),
                tolerant("the evaluation line", lambda: EvalTracker(console)),
                *both,
            ]
        ),
    )


def _services(config: Config, start: int, run_dir: Path) -> Iterator[tuple[str, Callable[[], Tracker]]]:
    """Those that take steps and evaluations alike. Their packages are imported only where they are asked for."""

    def tensorboard() -> Tracker:
        from orchestrator.tracking.tensorboard import TensorBoardTracker

        return TensorBoardTracker(run_dir / "tensorboard", start)

    def weights_and_biases() -> Tracker:
        from orchestrator.tracking.weights_and_biases import WandbTracker

        return WandbTracker(config, run_dir)

    if config.tracking.tensorboard:
        yield "TensorBoard", tensorboard
    if config.tracking.wandb.mode != "disabled":
        yield "W&B", weights_and_biases
