"""Native checkpoints from gang to gang: over changing layouts, and over saves that were killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.workers.gang_processes import GangFailed, run_gang
from tests.workers.train_jobs import Setting, farthest, whole

pytestmark = pytest.mark.prove


JOBS = "tests.workers.checkpoint_jobs"
DECAY = Setting(train=Setting().train.model_copy(update={"lr_decay_style": "linear", "lr_warmup_steps": 1}))
TP2, DP2, PP2 = replace(DECAY, tp=2), DECAY, replace(DECAY, pp=2)


Step = tuple[list[float], dict[str, torch.Tensor]]


def steps(root: Path, settings: list[Setting], load: Path | None, first: int) -> list[Step]:
    """One step in each layout, each continuing from the checkpoint of the one before. Learning rate and gradient norm
    of each, and the weights after it."""
    found = []
    for step, setting in enumerate(settings, start=first):
        save = root / str(step)
        save.mkdir(parents=True)
        ranks = run_gang(f"{JOBS}:chain", 2, (setting, load, save, step))
        found.append((ranks[0][0], whole([rank[1] for rank in ranks])))
        load = save
    return found


def test_a_run_that_changes_its_layout_at_every_resume_is_the_run_that_never_did(tmp_path: Path) -> None:
    steps(tmp_path, [TP2], None, 0)
    stayed = steps(tmp_path / "stayed", [TP2, TP2], tmp_path / "0", 1)
    moved = steps(tmp_path / "moved", [DP2, PP2], tmp_path / "0", 1)
    for (expected, expected_weights), (found, weights) in zip(stayed, moved, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
        assert farthest(weights, expected_weights) < 1e-6


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    moments = [(0, 0), (0, 3), (0, 8), (1, 0)]
    roots = [tmp_path / f"rank-{victim}-change-{change}" for victim, change in moments]
    for root, (victim, change) in zip(roots, moments, strict=True):
        with pytest.raises(GangFailed, match="died without a result, exit code -9"):
            run_gang(f"{JOBS}:killed_while_saving", 2, (DP2, root, victim, change))
    assert run_gang(f"{JOBS}:load_what_there_is", 1, (DP2, roots)) == [[(0, True)] * len(roots)]
