"""Wherever a run is cut and continued, it is the run that was never cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.resume_jobs import ROLLOUTS, Case
from tests.e2e.runs import TINY
from tests.workers.gang_processes import GangFailed, run_gang
from workers.config import ModelConfig
from workers.megatron.model import load_hf_config

# 7 rows in batches of 3: an epoch ends in the middle of a rollout.
ROWS = "".join(f'{{"prompt": "{i} {9 - i} {i // 2} =", "label": "{max(i, 9 - i)}"}}\n' for i in range(7))
BOUND = {"max_staleness": 2}
SAME = ("train/lr", "train/loss", "train/grad_norm", "train/kl_loss", "reward/mean")


def changes(mode: str, data: Path) -> dict[str, Any]:
    """`bridge` is a `sync` run that begins with the Hugging Face directory beside the data."""
    old = {"async": "engine", "fully_async": "old_actor"}
    return {
        "loop": {"num_rollout": ROLLOUTS, "mode": mode if mode in old else "sync"}
        | (BOUND if mode == "fully_async" else {}),
        "model": from_huggingface(data.parent / "base") if mode == "bridge" else {},
        "train": {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "num_steps_per_rollout": 2},
        "algorithm": {"old_logprobs": old.get(mode, "recompute")},
        "old_actor": {"keep": 3 if mode == "fully_async" else 2},
        "rollout": {"rollout_batch_size": 3, "n_samples_per_prompt": 4},
        "data": {"generator": None, "path": str(data)},
        "checkpoint": {"save_interval": 1, "keep": 2},
    }


def from_huggingface(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        torch.manual_seed(3)
        config = load_hf_config(ModelConfig(config=TINY["model"]["config"]))
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return {"config": None, "hf_checkpoint": str(directory), "megatron_to_hf_mode": "bridge"}


PROVEN = [pytest.param(mode, marks=pytest.mark.prove) for mode in ("bridge", "async", "fully_async")]


@pytest.fixture(scope="module", params=["sync", *PROVEN])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(mode: str, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    root = tmp_path_factory.mktemp(mode)
    (root / "rows.jsonl").write_text(ROWS)
    asked = changes(mode, root / "rows.jsonl")
    (found,) = run_gang("tests.e2e.resume_jobs:matrix", 1, (root, asked), time_limit_s=240.0)
    return found


def test_it_trains_on_the_same_samples_and_on_none_twice(cases: list[Case]) -> None:
    seldom, whole, *cut = cases
    expected = whole.did.trained
    assert len({(rollout, group, index) for rollout, group, index, _, _ in expected}) == ROLLOUTS * 12
    assert seldom.did.trained == expected
    for case in cut:
        assert case.cut_after is not None
        assert case.did.trained == [one for one in expected if one[0] > case.cut_after]


def test_it_ends_with_the_same_weights_to_the_bit(cases: list[Case]) -> None:
    assert [case.final for case in cases] == [cases[0].final] * len(cases)


def test_learning_rate_loss_and_reward_of_every_step_are_the_same(cases: list[Case]) -> None:
    expected = [[step[key] for key in SAME] for step in cases[0].did.steps]
    assert len({step["train/lr"] for step in cases[0].did.steps}) == ROLLOUTS
    for case in cases[1:]:
        assert [step["step"] for step in case.did.steps] == list(range(ROLLOUTS))
        assert [[step[key] for key in SAME] for step in case.did.steps] == expected


def test_samples_that_were_waiting_are_not_made_again(cases: list[Case], mode: str) -> None:
    ahead = {"async": 1, "fully_async": 2}.get(mode, 0)
    for case in cases[2:]:
        assert case.cut_after is not None
        left = ROLLOUTS - 1 - case.cut_after
        assert case.did.requests == 12 * max(0, left - ahead)


def test_every_sample_is_scored_by_the_version_that_generated_it_wherever_the_run_was_cut(
    cases: list[Case], mode: str
) -> None:
    """Where that is not what the engine recorded. In `fully_async` by old actors of up to two versions before."""
    staleness = [0, 1, 2, 2, 2, 2] if mode == "fully_async" else [None] * ROLLOUTS
    for case in cases:
        assert [step.get("rollout/staleness_max") for step in case.did.steps] == staleness
        gaps = [step.get("rollout/train_engine_logprob_diff_max") for step in case.did.steps]
        assert gaps == [None] * ROLLOUTS if mode == "async" else max(gaps) < 1e-5


def test_what_continues_is_found_to_be_what_was_saved(cases: list[Case], mode: str) -> None:
    assert cases[0].did.plan.load.kind == ("huggingface" if mode == "bridge" else "random")
    for case in cases[2:]:
        assert case.cut_after is not None
        assert (case.did.plan.source, case.did.plan.start_rollout_id) == ("native", case.cut_after + 1)
        assert case.did.jumps == []


@pytest.mark.prove
def test_a_process_that_is_killed_in_the_middle_of_a_save_costs_the_rollouts_since_the_one_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    asked = changes("async", tmp_path / "rows.jsonl")
    jobs = "tests.e2e.resume_jobs"
    (whole,) = run_gang(f"{jobs}:whole", 1, (tmp_path / "whole", asked), time_limit_s=240.0)
    for change in (1, 6, 12, 18):
        run_dir = tmp_path / f"change-{change}"
        with pytest.raises(GangFailed, match="exit code -9"):
            run_gang(f"{jobs}:killed_in_save", 1, (run_dir, asked, 3, change), time_limit_s=240.0)
        (rest,) = run_gang(f"{jobs}:whole", 1, (run_dir, asked), time_limit_s=240.0)
        start = rest.did.plan.start_rollout_id
        assert start in (3, 4)
        assert rest.did.trained == [one for one in whole.did.trained if one[0] >= start]
        assert rest.final == whole.final
        assert rest.did.jumps == []
