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
from tests.workers.gang_processes import GangFailed, run_gang
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
def reference() -> Step:
    """One rank, one micro-batch."""
    return run_cases(1, PLAIN, [Case([LEARNED], TOTALS, BUDGETS[8,], 0.2)])[0][0]


@pytest.fixture(scope="module")
def by_transformers() -> list[Tensor]:
    """Values of the same weights as transformers computes them."""
    (shards,) = run_gang(f"{JOBS}:weights_of", 1, (PLAIN,))
    config = load_hf_config(PLAIN.model)
    config.num_labels = 1
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    missing = model.load_state_dict(whole([shards]), strict=False)
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


SEQUENCE_PARALLEL = PLAIN.train.model_copy(update={"megatron": {"sequence_parallel": True}})


@pytest.mark.parametrize(
    ("world_size", "setting"),
    [
        (1, PLAIN),
        (2, replace(PLAIN, tp=2)),
        (2, replace(PLAIN, tp=2, train=SEQUENCE_PARALLEL)),
        (2, replace(PLAIN, pp=2)),
        (2, PLAIN),
        (4, Setting(tp=2, pp=2)),
    ],
    ids=["one", "tp2", "tp2sp", "pp2", "dp2", "tp2pp2"],
)
def test_values_and_steps_are_the_same_on_every_layout(
    world_size: int, setting: Setting, reference: Step, by_transformers: list[Tensor]
) -> None:
    dp = world_size // (setting.tp * setting.pp)
    budgets = [BUDGETS[8,], BUDGETS[5, 3], BUDGETS[(1,) * 8]]
    cases = [Case([LEARNED[i::dp] for i in range(dp)], TOTALS, budget, 0.2) for budget in budgets]
    if dp == 2:
        cases.append(Case([LEARNED, []], TOTALS, 30, 0.2))
    for case, steps in zip(cases, run_cases(world_size, setting, cases), strict=True):
        assert_same_step(steps, reference, gradients=not setting.train.use_distributed_optimizer)
        last = [step.values for step in steps if step.values is not None]
        assert len(last) == world_size // setting.pp
        for rank, found in enumerate(last):
            share = case.shares[rank // setting.tp]
            expected = [by_transformers[LEARNED.index(one)] for one in share]
            for own, its in zip(found, expected, strict=True):
                torch.testing.assert_close(own, its, atol=1e-5, rtol=0)
    assert reference.stats.clipped > 0


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


@pytest.mark.parametrize(("world_size", "sizes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {})])
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
    random = LoadSpec.random()
    loads = (random, LoadSpec(str(actor / "ckpt"), 0, "native"), LoadSpec(str(actor / "hf"), None, "huggingface"))
    held = []
    for load in loads:
        slot = SlotSpec(Slot.CRITIC, load, 0, Tier.COPY, fresh_head=True)
        (found,) = run_gang(f"{JOBS}:held_after_init", 1, (critic_setting(tmp_path / load.kind, slot),))
        held.append({name: values for name, *_, values in found})
    # The actor was drawn from the same seed and not trained.
    for other in held[1:]:
        assert held[0].keys() == other.keys()
        assert all(torch.equal(held[0][name], other[name]) for name in other)
    assert bool(held[0][VALUE_HEAD[0]].any())


def test_an_actors_checkpoint_is_no_critics(actor: Path, tmp_path: Path) -> None:
    slot = SlotSpec(Slot.CRITIC, LoadSpec(str(actor / "ckpt"), 0, "native"), 0, Tier.COPY)
    with pytest.raises(GangFailed, match=r"lacks .*value_head\.weight"):
        run_gang(f"{JOBS}:held_after_init", 1, (critic_setting(tmp_path, slot),))
