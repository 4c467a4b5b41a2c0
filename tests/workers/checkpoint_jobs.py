"""What the ranks of the checkpoint tests do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from state import checkpoints, saves
from state.continuity import Probe
from state.gang import ActorPermit, Quorum, mint_permit
from state.resume import LoadSpec, ResumeRequest, plan_resume
from state.slots import Slot, WeightId
from tests.state.kill_points import die_before_change
from tests.workers.gang_processes import Place
from tests.workers.train_jobs import (
    Setting,
    Shards,
    farthest,
    gang,
    make_samples,
    make_trainee,
    one_step,
    parameters,
    totals_of,
    whole,
    with_targets,
)
from workers.config import AlgorithmConfig
from workers.megatron import checkpoint, probe
from workers.megatron.parallel import coordinates
from workers.megatron.torch_dist import CopyNow

SAMPLES = make_samples()
TARGETS = with_targets(SAMPLES)
ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)


def permit_to(purpose: str) -> ActorPermit:
    quorum = Quorum("p", "run", "actor", Slot.ACTOR, WeightId(0, 2), "", (), (), (), {})
    return mint_permit(quorum, purpose)  # type: ignore[arg-type]


def train(model: object, optimizer: object, dp: int, steps: int, first: int = 0) -> list[float]:
    """Learning rates of `steps` steps. Each step has data of its own, split evenly over data-parallel ranks."""
    lrs = []
    for step in range(first, first + steps):
        samples = with_targets(SAMPLES, seed=step)
        mine = samples[coordinates().dp :: dp]
        result = one_step(model, optimizer, mine, totals_of(SAMPLES), ALGORITHM)  # type: ignore[arg-type]
        assert result.mismatches == []
        lrs.append(result.stats.lr)
    return lrs


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def train_and_save(place: Place, setting: Setting, path: Path, steps: int) -> tuple[list[float], Shards, list[float]]:
    """Train, save, and train one step more. Learning rates of all steps and of the one to come; weights after the last
    step; random numbers drawn after the save."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        lrs = train(model, optimizer, layout.dp, steps)
        for _ in range(place.rank + 1):
            draws()
        checkpoint.save_state(path, model, optimizer, permit=permit_to("save"))
        numbers = draws()
        lrs += [*train(model, optimizer, layout.dp, 1, first=steps), optimizer.lr]
        return lrs, parameters(model), numbers


def save_now_and_from_a_copy(place: Place, setting: Setting, now: Path, later: Path) -> int:
    """Save to `now`; and to `later` what was copied at the same time, when another step has been taken. Returns how
    many files there were in `later` while it was only copied."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        train(model, optimizer, layout.dp, 2)
        for _ in range(place.rank + 1):
            draws()
        checkpoint.save_state(now, model, optimizer, permit=permit_to("save"))
        by = CopyNow()
        checkpoint.save_state(later, model, optimizer, permit=permit_to("save"), by=by)
        copied = len(list(later.glob("*.distcp")))
        train(model, optimizer, layout.dp, 1, first=2)
        draws()
        (copy,) = by.copies
        assert copy.nbytes > 0 or place.rank > 0  # of replicas the first one writes
        mine = copy.write()
        assert copy.nbytes == 0
        everyone = [mine] * place.world_size
        torch.distributed.all_gather_object(everyone, mine)
        if place.rank == 0:
            copy.complete(everyone)
        torch.distributed.barrier()
        return copied


def load_and_train(
    place: Place, setting: Setting, path: Path, steps: int, load_rng: bool = True
) -> tuple[list[float], Shards, list[float], bool, Shards]:
    """Load into other weights and take the next step. Its learning rate and the one after; weights; random numbers;
    whether random state was restored; the weights as loaded."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting, seed=99)
        train(model, optimizer, layout.dp, 1, first=50)
        restored = checkpoint.load_state(path, model, optimizer, load_rng=load_rng)
        assert optimizer.master_mismatches() == []
        numbers, loaded = draws(), parameters(model)
        lrs = [*train(model, optimizer, layout.dp, 1, first=steps), optimizer.lr]
        return lrs, parameters(model), numbers, restored, loaded


def cold_start(place: Place, setting: Setting, path: Path, steps: int) -> Shards:
    """Load weights alone and take the next step."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting, seed=99)
        checkpoint.load_weights(path, model)
        optimizer.reload_masters()
        assert optimizer.master_mismatches() == []
        train(model, optimizer, layout.dp, 1, first=steps)
        return parameters(model)


def save_weights(place: Place, setting: Setting, path: Path) -> Shards:
    with gang(place, setting) as layout:
        model, _ = make_trainee(layout, setting)
        checkpoint.save_weights(path, model)
        return parameters(model)


def load_weights(place: Place, setting: Setting, path: Path) -> Shards:
    with gang(place, setting) as layout:
        model, _ = make_trainee(layout, setting, seed=99)
        checkpoint.load_weights(path, model)
        return parameters(model)


def errors_of_loading(place: Place, setting: Setting, paths: Sequence[Path]) -> list[str]:
    """What loading the whole state from each path says."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        messages = []
        for path in paths:
            try:
                checkpoint.load_state(path, model, optimizer)
                messages.append("")
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
        return messages


def save_with(place: Place, setting: Setting, path: Path, purpose: str) -> None:
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        checkpoint.save_state(path, model, optimizer, permit=permit_to(purpose))


def in_dtype(setting: Setting, dtype: str) -> Setting:
    return replace(setting, model=setting.model.model_copy(update={"dtype": dtype}))


def killed_while_saving(place: Place, setting: Setting, root: Path, victim: int, kill_at: int) -> None:
    """Save iteration 0 as a run does, train, save iteration 1; in that, rank `victim` is killed at its change `kill_at`
    of the file system."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        for iteration in (0, 1):
            if iteration == 1:
                train(model, optimizer, layout.dp, 1)
                if place.rank == victim:
                    die_before_change(kill_at)
            if place.rank == 0:
                saves.begin(root, iteration)
            torch.distributed.barrier()
            path = checkpoints.iteration_dir(root, iteration)
            checkpoint.save_state(path, model, optimizer, permit=permit_to("save"))
            torch.distributed.barrier()
            if place.rank == 0:
                saves.write_data(path, {})
                saves.commit(root, iteration, {}, keep=1)


def load_what_there_is(place: Place, setting: Setting, roots: Sequence[Path]) -> list[tuple[int | None, bool]]:
    """The iteration that a run would continue from in each root, and whether it holds the weights of iteration 0."""
    found = []
    with gang(place, setting) as layout:
        expected = whole([parameters(make_trainee(layout, setting)[0])])
        for root in roots:
            model, optimizer = make_trainee(layout, setting, seed=99)
            plan = plan_resume(ResumeRequest(str(root), LoadSpec.random(), resume="must"), checkpoints.inspect(root))
            assert plan.iteration is not None
            checkpoint.load_state(checkpoints.iteration_dir(root, plan.iteration), model, optimizer)
            found.append((plan.iteration, farthest(whole([parameters(model)]), expected) == 0.0))
    return found


def chain(place: Place, setting: Setting, load: Path | None, save: Path, step: int) -> tuple[list[float], Shards]:
    """Load (or begin), take step number `step`, save. Learning rate and gradient norm of the step; weights after it."""
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        if load is not None:
            checkpoint.load_state(load, model, optimizer)
        samples = with_targets(SAMPLES, seed=step)
        result = one_step(model, optimizer, samples[coordinates().dp :: layout.dp], totals_of(SAMPLES), ALGORITHM)
        assert result.mismatches == []
        checkpoint.save_state(save, model, optimizer, permit=permit_to("save"))
        return [result.stats.lr, result.stats.grad_norm], result.parameters


def probe_of(place: Place, setting: Setting, path: Path) -> tuple[Probe | None, bool]:
    """The probe of a gang that loaded `path`; and whether its next step is that of a gang that took no probe."""
    with gang(place, setting) as layout:
        after = []
        taken = None
        for take in (False, True):
            model, optimizer = make_trainee(layout, setting, seed=99)
            checkpoint.load_state(path, model, optimizer)
            if take:
                nobody: Any = None
                taken = probe.take(model, optimizer, nobody, has_ref=False, dtype="float32")
                assert optimizer.master_mismatches() == []
            train(model, optimizer, layout.dp, 1, first=7)
            after.append(parameters(model))
        same = all(torch.equal(a[3], b[3]) for a, b in zip(*after, strict=True))
        return taken, same
