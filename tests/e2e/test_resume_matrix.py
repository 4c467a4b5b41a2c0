"""Wherever a run is cut and continued, it is the run that was never cut."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.resume_jobs import ROLLOUTS, Case
from tests.workers.gang_processes import run_gang

# 7 rows in batches of 3: an epoch ends in the middle of a rollout.
ROWS = "".join(f'{{"prompt": "{i} {9 - i} {i // 2} =", "label": "{max(i, 9 - i)}"}}\n' for i in range(7))
SAME = ("train/lr", "train/loss", "train/grad_norm", "train/kl_loss", "reward/mean")


def changes(mode: str, data: Path, save_interval: int = 1) -> dict[str, Any]:
    return {
        "loop": {"num_rollout": ROLLOUTS, "mode": mode},
        "train": {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "num_steps_per_rollout": 2},
        "algorithm": {"old_logprobs": "engine" if mode == "async" else "recompute"},
        "rollout": {"rollout_batch_size": 3, "n_samples_per_prompt": 4},
        "data": {"generator": None, "path": str(data)},
        "checkpoint": {"save_interval": save_interval, "keep": 2},
    }


@pytest.fixture(scope="module", params=["sync", "async"])
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    root = tmp_path_factory.mktemp(request.param)
    (root / "rows.jsonl").write_text(ROWS)
    asked = changes(request.param, root / "rows.jsonl")
    (found,) = run_gang("tests.e2e.resume_jobs:matrix", 1, (root, asked), time_limit_s=240.0)
    return found


def test_it_trains_on_the_same_samples_and_on_none_twice(cases: list[Case]) -> None:
    whole, *cut = cases
    expected = whole.parts[0].trained
    assert len({(rollout, group, index) for rollout, group, index, _, _ in expected}) == ROLLOUTS * 12
    for case in cut:
        assert list(chain(*(part.trained for part in case.parts))) == expected


def test_it_ends_with_the_same_weights_to_the_bit(cases: list[Case]) -> None:
    whole, *cut = cases
    assert [case.final for case in cut] == [whole.final] * len(cut)


def test_learning_rate_loss_and_reward_of_every_step_are_the_same(cases: list[Case]) -> None:
    whole, *cut = cases
    expected = [[step[key] for key in SAME] for step in whole.parts[0].steps]
    assert len({step["train/lr"] for step in whole.parts[0].steps}) == ROLLOUTS
    for case in cut:
        assert [step["step"] for step in case.parts[-1].steps] == list(range(ROLLOUTS))
        assert [[step[key] for key in SAME] for step in case.parts[-1].steps] == expected


def test_each_part_begins_where_the_one_before_it_was_cut(cases: list[Case]) -> None:
    for case in cases[1:]:
        assert case.cut_after is not None
        assert case.parts[1].plan.start_rollout_id == case.cut_after + 1


def test_samples_that_were_waiting_are_not_made_again(cases: list[Case]) -> None:
    whole, *cut = cases
    assert [sum(part.requests for part in case.parts) for case in cut] == [whole.parts[0].requests] * len(cut)
