"""Engines hold the trainer's weights before they generate for the first time, wherever a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import journal
from tests.e2e.slot_jobs import Told
from tests.workers.gang_processes import run_gang

STARTS = (0, 1, 17)


def starting(at: int) -> dict[str, Any]:
    return {
        "loop": {"start_rollout_id": at, "num_rollout": at + 1},
        "algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.0},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Told]:
    told: dict[str, Told]
    (told,) = run_gang("tests.e2e.slot_jobs:several", 1, (root, {str(at): (starting(at), None) for at in STARTS}))
    return told


@pytest.mark.parametrize("at", STARTS)
def test_what_generates_first_was_published_by_this_start(runs: dict[str, Told], root: Path, at: int) -> None:
    told = runs[str(at)]
    assert told.last.plan.start_rollout_id == at
    assert told.last.requests == 2
    before = [entry["trigger"] for entry in told.entries if entry.get("trigger") in ("publish", "step", "commit")]
    assert before == ["publish", "step", "commit", "publish"]
    (trained,) = journal(root / str(at), "driver", "trained")
    assert (trained["rollout_id"], trained["behaviour"], trained["version"]) == (at, [0], at + 1)
    assert told.findings == []
