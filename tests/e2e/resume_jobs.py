"""What the process of test_resume_matrix.py does: many runs, one after another."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.in_process_run import Outcome, go
from tests.e2e.runs import marker
from tests.workers.gang_processes import Place

ROLLOUTS = 6


@dataclass(frozen=True)
class Case:
    """A run that was cut after `cut_after` and continued; None: never cut."""

    cut_after: int | None
    parts: list[Outcome]
    final: dict[str, str]
    """Digest of each tensor in the last checkpoint."""


def matrix(place: Place, root: Path, changes: dict[str, Any]) -> list[Case]:
    """The whole run, and one for each place to cut it."""
    return [_case(root / f"cut-{cut}", changes, cut) for cut in (None, *range(ROLLOUTS - 1))]


def _case(run_dir: Path, changes: dict[str, Any], cut: int | None) -> Case:
    parts = [go(run_dir, changes, cut_after=cut)]
    if cut is not None:
        parts.append(go(run_dir, changes))
    final = marker(run_dir / "checkpoints", ROLLOUTS - 1)["tensors"]
    shutil.rmtree(run_dir / "checkpoints")
    return Case(cut, parts, final)
