"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from orchestrator.tracking.base import scalars


class TensorBoardTracker:
    """Writes scalars to `directory`; each step is on the disk when `log` returns.

    Steps from `start_step` on that an earlier start left there are hidden by TensorBoard, since they run again.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        self._writer = SummaryWriter(str(directory), purge_step=start_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
