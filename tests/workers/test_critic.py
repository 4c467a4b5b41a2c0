"""A critic: the same values and the same step on every layout and for every split, and whole ranks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from state.audit import audit
from state.journal import Journal
from state.resume import LoadSpec
from state.slots import Slot, Tier
from tests.workers import critic_jobs, rank_jobs
from tests.workers.critic_jobs import Case, Step, critic_setting
from tests.workers.gang_processes import run_gang
from tests.workers.train_jobs import (
    BUDGETS,
    Setting,
    farthest,
    make_samples,
    no_distributed_optimizer,
    totals_of,
    whole,
)
from workers.megatron.hf_layout import VALUE_HEAD
from workers.megatron.model import load_hf_config
from workers.megatron.spec import SlotSpec
from workers.megatron.values import ValueSample

JOBS = "tests.workers.critic_jobs"
PLAIN = no_distributed_optimizer(Setting())
SAMPLES = make_samples()
TOTALS = totals_of(SAMPLES)


def learned(seed: int = 1) -> list[ValueSample]:
    """Old values and returns of each sample; what stands at masked tokens is no number."""
    generator, made = torch.Generator().manual_seed(seed), []
    for sample in SAMPLES:
        mask = torch.tensor(sample.loss_mask).bool()
        old, returns = (torch.randn(mask.shape, generator=generator) * 0.3 for _ in range(2))
        nan = torch.tensor(torch.nan)
        made.append(ValueSample(sample, torch.where(mask, old, nan), torch.where(mask, returns, nan)))
    return made


LEARNED = learned()


def run_cases(world_size: int, setting: Setting, cases: Sequence[Case]) -> list[list[Step]]:
    """For each case the steps of all ranks."""
    ranks = run_gang(f"{JOBS}:steps_of", world_size, (setting, cases))
    return [list(steps) for steps in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def alone() -> list[Step]:
    """One rank: in one micro-batch, in two, and in one of each sample."""
    budgets = [BUDGETS[8,], BUDGETS[5, 3], BUDGETS[(1,) * 8]]
    return [steps[0] for steps in run_cases(1, PLAIN, [Case([LEARNED], TOTALS, budget, 0.2) for budget in budgets])]


@pytest.fixture(scope="module")
def by_transformers(alone: list[Step]) -> list[Tensor]:
    """Values of the same weights as transformers computes them."""
    config = load_hf_config(PLAIN.model)
    config.num_labels = 1
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    missing = model.load_state_dict(whole([alone[0].began]), strict=False)
    assert missing.missing_keys == missing.unexpected_keys == []
    found = []
    for sample in SAMPLES:
        with torch.no_grad():
            scores = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, :, 0]
        found.append(scores[len(sample.prompt_ids) - 1 : -1])
    return found


def assert_same_step(steps: Sequence[Step], expected: Step, *, gradients: bool) -> None:
    assert farthest(whole([s.parameters for s in steps]), whole([expected.parameters])) < 1e-6
    if gradients:
        assert farthest(whole([s.gradients for s in steps]), whole([expected.gradients])) < 1e-6
    for step in steps:
        for name in ("loss", "value_sum", "grad_norm"):
            assert getattr(step.stats, name) == pytest.approx(getattr(expected.stats, name), rel=1e-5, abs=1e-6), name
        assert (step.stats.tokens, step.stats.clipped) == (TOTALS.tokens, expected.stats.clipped)


def assert_values(found: Sequence[Tensor], share: Sequence[ValueSample], by_transformers: list[Tensor]) -> None:
    for own, one in zip(found, share, strict=True):
        torch.testing.assert_close(own, by_transformers[LEARNED.index(one)], atol=1e-5, rtol=0)


def test_any_split_into_micro_batches_gives_the_values_of_transformers_and_the_same_step(
    alone: list[Step], by_transformers: list[Tensor]
) -> None:
    for step in alone:
        assert step.values is not None
        assert_values(step.values, LEARNED, by_transformers)
        assert_same_step([step], alone[0], gradients=True)
    assert alone[0].stats.clipped > 0


SEQUENCE_PARALLEL = PLAIN.train.model_copy(update={"megatron": {"sequence_parallel": True}})


@pytest.mark.parametrize(
    ("world_size", "setting"),
    [
        pytest.param(2, replace(PLAIN, tp=2), id="tp2"),
        pytest.param(2, replace(PLAIN, tp=2, train=SEQUENCE_PARALLEL), id="tp2sp"),
        pytest.param(2, replace(PLAIN, pp=2), id="pp2"),
        pytest.param(2, PLAIN, id="dp2"),
        pytest.param(4, Setting(tp=2, pp=2), id="tp2pp2", marks=pytest.mark.prove),
    ],
)
def test_values_and_steps_are_the_same_on_every_layout(
    world_size: int, setting: Setting, alone: list[Step], by_transformers: list[Tensor]
) -> None:
    dp = world_size // (setting.tp * setting.pp)
    cases = [Case([LEARNED[i::dp] for i in range(dp)], TOTALS, BUDGETS[5, 3], 0.2)]
    if dp == 2:
        cases.append(Case([LEARNED, []], TOTALS, 30, 0.2))
    for case, steps in zip(cases, run_cases(world_size, setting, cases), strict=True):
        assert_same_step(steps, alone[0], gradients=not setting.train.use_distributed_optimizer)
        last = [step.values for step in steps if step.values is not None]
        assert len(last) == world_size // setting.pp
        for rank, found in enumerate(last):
            assert_values(found, case.shares[rank // setting.tp], by_transformers)


# ---- whole ranks


def test_a_critic_can_never_publish_nor_do_what_an_actor_does(tmp_path: Path) -> None:
    (told,) = run_gang(f"{JOBS}:refusals", 1, (critic_setting(tmp_path), tmp_path / "ckpt"))
    assert "publish" in told["publish"]
    assert told["state after it"] == "resident.critic"
    assert told["snapshot"] != ""
    assert "is a critic" in told["experience"]
    assert "was given no returns of rollout 1" in told["train"]
    assert "version=1" in told["version"], "a step without returns changed nothing"
    Journal(tmp_path / "journal" / "driver.jsonl", "driver")
    assert not any("publish" in str(e.get("after")) for e in audit(tmp_path).to_json()["ranks"]["critic/0"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A critic of two rollouts, saved after the first."""
    root = tmp_path_factory.mktemp("critic")
    (whole_run,) = run_gang(f"{JOBS}:train_on", 1, (critic_setting(root), root / "ckpt", 0, 2, 0))
    return root, whole_run


PROVEN = [pytest.param(2, sizes, marks=pytest.mark.prove) for sizes in ({"pp": 2}, {})]


@pytest.mark.parametrize(("world_size", "sizes"), [(1, {}), (2, {"tp": 2}), *PROVEN])
def test_resumed_it_goes_on_as_if_never_stopped_on_any_layout(
    saved: tuple[Path, Any], tmp_path: Path, world_size: int, sizes: dict[str, int]
) -> None:
    root, uninterrupted = saved
    slot = SlotSpec(Slot.CRITIC, LoadSpec(str(root / "ckpt"), 0, "native"), 1, Tier.COPY)
    setting = critic_setting(tmp_path, slot, load_optimizer=True, incarnation=2, **sizes)
    ranks = run_gang(f"{JOBS}:train_on", world_size, (setting, tmp_path / "ckpt", 1, 2, -1))
    if world_size == 1:
        assert ranks[0].digest == uninterrupted.digest
    metrics = next(rank.metrics for rank in ranks if rank.metrics[0])
    for name, value in uninterrupted.metrics[1].items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_it_learns_what_returns_are(saved: tuple[Path, Any]) -> None:
    losses = [step["critic/loss"] for step in saved[1].metrics]
    assert losses[1] < losses[0]
    assert saved[1].metrics[0].keys() >= {"critic/explained_variance", "critic/lr", "critic/grad_norm"}


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an untrained actor is saved, natively in `ckpt` and for Hugging Face in `hf`."""
    root = tmp_path_factory.mktemp("actor")
    alone = replace(rank_jobs.Setting(root), slots=rank_jobs.SLOTS[:1], algorithm=critic_jobs.PPO)
    setting = replace(alone, keep_old_actors=0, ref_update_interval=None)
    run_gang(f"{JOBS}:save_an_actor", 1, (setting, root / "ckpt", root / "hf"))
    return root


def test_it_begins_with_an_actors_weights_and_a_seeded_head_from_wherever_those_are(
    actor: Path, tmp_path: Path
) -> None:
    native = LoadSpec(str(actor / "ckpt"), 0, "native")
    loads = (LoadSpec.random(), native, LoadSpec(str(actor / "hf"), None, "huggingface"))
    slots = [SlotSpec(Slot.CRITIC, load, 0, Tier.COPY, fresh_head=True) for load in loads]
    slots.append(SlotSpec(Slot.CRITIC, native, 0, Tier.COPY))
    (told,) = run_gang(f"{JOBS}:held_after_init", 1, (tmp_path, slots))
    drawn, *others = ({name: values for name, *_, values in shards} for shards in told[:3])
    # The actor was drawn from the same seed and not trained.
    for other in others:
        assert drawn.keys() == other.keys()
        assert all(torch.equal(drawn[name], other[name]) for name in other)
    assert bool(drawn[VALUE_HEAD[0]].any())
    assert "lacks" in told[3], "an actor's checkpoint is no critic's"
    assert "value_head.weight" in told[3]
