"""The optimizer: Adam, its schedule, masters against live bytes, overlapped gathers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.checkpoint_jobs import in_dtype
from tests.workers.gang_processes import Place, run_gang
from tests.workers.train_jobs import (
    TEMPERATURE,
    Setting,
    Shards,
    farthest,
    gang,
    make_samples,
    make_trainee,
    no_distributed_optimizer,
    one_step,
    parameters,
    totals_of,
    whole,
    with_targets,
)
from workers.config import AlgorithmConfig
from workers.megatron.adam import FusedLayoutAdam
from workers.megatron.forward import score, train_step
from workers.megatron.optimizer import optimizer_config

HERE = "tests.workers.test_optimizer"
SAMPLES = make_samples()
TARGETS = with_targets(SAMPLES)
TOTALS = totals_of(SAMPLES)
ALGORITHM = AlgorithmConfig()


def with_train(**options: Any) -> Setting:
    return Setting(train=Setting().train.model_copy(update=options))


# --- Adam


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7,), (3, 5), (2, 2, 2))]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_adam(weight_decay: float, decoupled: bool) -> None:
    ours, theirs = make_parameters(), make_parameters()
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    adam = FusedLayoutAdam(ours, lr=1e-2, adam_w_mode=decoupled, **options)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for group in (*adam.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        adam.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=0)


def test_adam_keeps_the_state_that_fused_kernels_keep() -> None:
    params = make_parameters()
    adam = FusedLayoutAdam([{"params": params[:2]}, {"params": []}, {"params": params[2:]}], 1e-2, (0.9, 0.9), 1e-8, 0)
    assert "step" not in adam.param_groups[0]
    params[0].grad = torch.ones_like(params[0])
    adam.step()
    assert adam.state[params[0]].keys() == {"exp_avg", "exp_avg_sq"}
    assert not adam.state[params[1]]
    assert [group.get("step") for group in adam.param_groups] == [1, None, 1]


def test_adam_continues_from_its_state() -> None:
    whole_run, first, second = make_parameters(), make_parameters(), make_parameters()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    run, before, after = (FusedLayoutAdam(p, **options) for p in (whole_run, first, second))

    def take(adam: FusedLayoutAdam, params: list[nn.Parameter], steps: int) -> None:
        for _ in range(steps):
            for p in params:
                p.grad = p.detach() * 2
            adam.step()

    take(run, whole_run, 5)
    take(before, first, 3)
    after.load_state_dict(before.state_dict())
    for p, q in zip(second, first, strict=True):
        p.data.copy_(q.data)
    take(after, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole_run, second, strict=True))


# --- learning rate


def learning_rates(place: Place, setting: Setting, steps: int) -> list[float]:
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        lrs = []
        for step in range(steps):
            # One step in the middle that cannot be taken.
            broken = [replace(TARGETS[0], advantage=float("nan"))] if step == 2 else []
            stats = one_step(model, optimizer, [*broken, *TARGETS], TOTALS, ALGORITHM).stats
            if not stats.skipped:
                lrs.append(stats.lr)
        assert optimizer.num_steps == len(lrs)
        at = optimizer.lr
        optimizer.restore_schedule(optimizer.num_steps)
        assert optimizer.lr == at
        return lrs


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"lr_warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1, 1]),
        ({"lr_decay_style": "linear"}, [1, 3 / 4, 2 / 4, 1 / 4, 0]),
        ({"lr_decay_style": "linear", "min_lr": 0.5e-2}, [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8]),
        ({"lr_decay_style": "cosine", "lr_warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1 / 2, 0]),
    ],
)
def test_the_schedule_counts_optimizer_steps_that_were_taken(options: dict[str, Any], shares: list[float]) -> None:
    setting = replace(with_train(**options), total_steps=4)
    (lrs,) = run_gang(f"{HERE}:learning_rates", 1, (setting, 6))
    assert lrs == pytest.approx([share * setting.train.lr for share in shares], abs=1e-9)


def split_rates(place: Place, setting: Setting, steps: int) -> tuple[list[float], dict[int, list[float]]]:
    """Learning rates of an uninterrupted run, and of what continues it after each of its steps."""
    with gang(place, setting) as layout:

        def rates(after: int) -> list[float]:
            model, optimizer = make_trainee(layout, setting)
            one_step(model, optimizer, TARGETS, TOTALS, ALGORITHM)  # what is restored does not depend on where it was
            optimizer.restore_schedule(after)
            return [one_step(model, optimizer, TARGETS, TOTALS, ALGORITHM).stats.lr for _ in range(after, steps)]

        model, optimizer = make_trainee(layout, setting)
        whole = [one_step(model, optimizer, TARGETS, TOTALS, ALGORITHM).stats.lr for _ in range(steps)]
        return whole, {after: rates(after) for after in range(steps)}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_learning_rate_of_a_step_is_the_same_wherever_the_run_was_split(style: str) -> None:
    setting = replace(with_train(lr_decay_style=style, lr_warmup_steps=2, min_lr=1e-4), total_steps=6)
    ((whole, split),) = run_gang(f"{HERE}:split_rates", 1, (setting, 6))
    assert len(set(whole)) == (3 if style == "constant" else 6)
    for after, rates in split.items():
        assert rates == whole[after:]


# --- masters


def damage_and_compare(place: Place, setting: Setting) -> dict[str, list[str]]:
    """Mismatches as built, after a step, after each damage, and after a repair."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        found = {"built": optimizer.master_mismatches()}
        found["stepped"] = one_step(model, optimizer, TARGETS[place.rank :: layout.dp], TOTALS, ALGORITHM).mismatches
        weight = dict(model.named_parameters())["module.decoder.layers.1.mlp.linear_fc2.weight"]
        with torch.no_grad():
            weight.view(-1)[[0, -1]] += 1.0
        found["changed"] = optimizer.master_mismatches()
        optimizer.reload_masters()
        found["reloaded"] = optimizer.master_mismatches()
        resident = weight.data
        weight.data = resident.clone()
        found["moved"] = optimizer.master_mismatches()
        weight.data = resident
        found["back"] = optimizer.master_mismatches()
        return found


FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_masters_are_compared_with_the_live_bytes(world_size: int) -> None:
    ranks = run_gang(f"{HERE}:damage_and_compare", world_size, (in_dtype(Setting(), "bfloat16"),))
    for found in ranks:
        assert all(found[when] == [] for when in ("built", "stepped", "reloaded", "back"))
    # Each rank answers for its own shards.
    assert {name for found in ranks for name in found["changed"]} == {FC2}
    assert {name for found in ranks for name in found["moved"]} == {FC2}


def test_float32_masters_are_the_live_bytes_and_must_stay_in_place() -> None:
    (found,) = run_gang(f"{HERE}:damage_and_compare", 1, (Setting(),))
    assert found.pop("moved") == [FC2]
    assert all(names == [] for names in found.values())


def test_the_plain_optimizer_is_compared_too() -> None:
    plain = no_distributed_optimizer(Setting())
    (found,) = run_gang(f"{HERE}:damage_and_compare", 1, (in_dtype(plain, "bfloat16"),))
    assert found["changed"] == [FC2]
    assert found["stepped"] == found["reloaded"] == []


def freeze_out(place: Place) -> list[str]:
    with gang(place, Setting()) as layout:
        model, optimizer = make_trainee(layout, Setting())
        model.module.register_parameter("forgotten", nn.Parameter(torch.zeros(2)))
        return optimizer.master_mismatches()


def test_a_parameter_that_no_optimizer_knows_is_a_mismatch() -> None:
    assert run_gang(f"{HERE}:freeze_out", 1) == [["forgotten"]]


# --- gathers that overlap with the forward pass


def overlapped_steps(place: Place, setting: Setting) -> tuple[Shards, list[str], bool]:
    """Weights after two steps, and whether the last gather was still open before it was finished."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        mine = TARGETS[place.rank :: layout.dp]
        for _ in range(2):
            train_step(
                model,
                optimizer,
                mine,
                TOTALS,
                algorithm=ALGORITHM,
                temperature=TEMPERATURE,
                max_tokens=64,
                before_write=lambda: None,
            )
        before = parameters(model)
        optimizer.finish_gather()
        after = parameters(model)
        was_open = any(not torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
        return after, optimizer.master_mismatches(), was_open


OVERLAPPED = with_train(megatron={"overlap_param_gather": True})


def test_overlapped_gathers_end_in_the_same_weights() -> None:
    ranks = run_gang(f"{HERE}:overlapped_steps", 2, (OVERLAPPED,))
    plain = run_gang(f"{HERE}:overlapped_steps", 2, (Setting(),))
    assert farthest(whole([r[0] for r in ranks]), whole([r[0] for r in plain])) < 1e-6
    assert all(mismatches == [] for _, mismatches, _ in (*ranks, *plain))
    assert all(was_open for _, _, was_open in ranks)
    assert not any(was_open for _, _, was_open in plain)


def score_with_other_weights_on_one_rank(place: Place, gather: bool) -> bool:
    """Whether a forward pass wrote into the live weights."""
    with gang(place, OVERLAPPED) as layout:
        model, optimizer = make_trainee(layout, OVERLAPPED)
        with nullcontext() if gather else optimizer.gather_off():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(place.rank))
            score(model, SAMPLES, temperature=TEMPERATURE, max_tokens=64)
            kept = all(bool((p == place.rank).all()) for p in model.parameters())
        score(model, SAMPLES, temperature=TEMPERATURE, max_tokens=64)
        return not kept


def test_forward_passes_gather_nothing_while_another_slot_is_resident() -> None:
    job = f"{HERE}:score_with_other_weights_on_one_rank"
    assert run_gang(job, 2, (False,)) == [False, False]
    assert run_gang(job, 2, (True,)) == [True, True]


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"megatron": {"lr": 1.0}}, "train.megatron.lr is decided"),
        ({"megatron": {"use_precision_aware_optimizer": True}}, "cannot be compared with the live weights"),
        (
            {"megatron": {"overlap_param_gather": True}, "use_distributed_optimizer": False},
            "needs train.use_distributed_optimizer",
        ),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_config(with_train(**options).train, torch.float32)


def test_options_of_megatrons_optimizer_pass_through() -> None:
    train = with_train(megatron={"log_num_zeros_in_grad": True, "recompute_granularity": "full"}).train
    config = optimizer_config(train, torch.bfloat16)
    assert config.log_num_zeros_in_grad
    assert config.bf16


def write_in_the_wrong_order(place: Place) -> list[str]:
    """What had changed when `before_write` was called."""
    with gang(place, Setting()) as layout:
        model, optimizer = make_trainee(layout, Setting())
        before = parameters(model)
        state = {k: v.clone() for s in optimizer.megatron.optimizer.state.values() for k, v in s.items()}
        changed: list[str] = []

        def look() -> None:
            now = {k: v for s in optimizer.megatron.optimizer.state.values() for k, v in s.items()}
            changed.extend(a[0] for a, b in zip(before, parameters(model), strict=True) if not torch.equal(a[3], b[3]))
            changed.extend(k for k, v in now.items() if not torch.equal(v, state[k]))
            raise RuntimeError("stop before the write")

        options: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": 64, "algorithm": ALGORITHM}
        with pytest.raises(RuntimeError, match="stop before"):
            train_step(model, optimizer, TARGETS, TOTALS, before_write=look, **options)
        changed.extend(a[0] for a, b in zip(before, parameters(model), strict=True) if not torch.equal(a[3], b[3]))
        return changed


def test_before_write_comes_before_anything_changes_and_can_stop_it() -> None:
    assert run_gang(f"{HERE}:write_in_the_wrong_order", 1) == [[]]
