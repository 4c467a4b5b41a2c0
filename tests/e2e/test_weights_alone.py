"""From weights alone everything else starts anew: the optimizer, its schedule, the data."""

from __future__ import annotations

from pathlib import Path

from tests.workers.gang_processes import run_gang


def test_a_run_from_weights_alone_has_the_schedule_and_the_prompts_of_a_fresh_one(tmp_path: Path) -> None:
    changes = {
        "loop": {"num_rollout": 3},
        "train": {"lr_decay_style": "linear"},
        "checkpoint": {"save_interval": 3},
    }
    ((first, second),) = run_gang(
        "tests.e2e.resume_jobs:from_weights_alone", 1, (tmp_path, changes), time_limit_s=240.0
    )
    assert (second.plan.iteration, second.plan.start_rollout_id) == (2, 0)
    assert (second.plan.load_optimizer, second.plan.load_rng, second.plan.load_data) == (False, False, False)
    rates = [step["train/lr"] for step in first.steps]
    assert len(set(rates)) == 3
    assert [step["train/lr"] for step in second.steps] == rates
    assert [one[:4] for one in second.trained] == [one[:4] for one in first.trained]
    assert [one[4] for one in second.trained] != [one[4] for one in first.trained]
    assert second.jumps == []
