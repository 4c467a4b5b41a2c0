"""The policy that the ratio is taken to is the one that generated, in every loop and interval (I9).

In float32 the log-probs that a sample came with are those of the weights that generated it, up to rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.state.journal_edits import findings
from tests.workers.behaviour_jobs import ROLLOUTS, SCHEDULES, Told
from tests.workers.gang_processes import run_gang

ROUNDING = 5e-6
Schedules = dict[str, Told]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.fixture(scope="module")
def schedules(run_dir: Path) -> Schedules:
    told: Schedules
    (told,) = run_gang("tests.workers.behaviour_jobs:every_schedule", 1, (run_dir,))
    return told


@pytest.mark.parametrize(("mode", "interval"), SCHEDULES)
def test_old_actor_is_exactly_what_generated(schedules: Schedules, mode: str, interval: int) -> None:
    gaps = schedules[f"{mode}-{interval}"].gaps
    assert len(gaps) == ROLLOUTS
    assert max(gaps) < ROUNDING


def test_another_policy_would_be_seen(schedules: Schedules) -> None:
    """Where the actor has moved on, it says something else."""
    assert max(schedules["sync-1"].moved) < ROUNDING
    for behind in ("sync-2", "sync-3", "async-1", "async-2", "async-3"):
        assert max(schedules[behind].moved) > 20 * ROUNDING


def test_the_journals_show_it_too(schedules: Schedules, run_dir: Path) -> None:
    assert findings(run_dir) == []
