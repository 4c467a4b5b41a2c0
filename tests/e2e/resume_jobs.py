"""What the process of test_resume_matrix.py does: many runs, one after another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.resume.continuity import ContinuityBroken
from state.resume import LoadSpec
from state.slots import Slot
from tests.e2e.in_process_run import Outcome, go
from tests.e2e.runs import journal, marker, merged
from tests.state.kill_points import die_before_change
from tests.workers.gang_processes import Place
from workers.megatron.spec import WorkerSpec

ROLLOUTS = 6


@dataclass(frozen=True)
class Case:
    """A run, or what continued one that was cut after `cut_after`."""

    cut_after: int | None
    did: Outcome
    final: dict[str, str]
    """Digest of each tensor in the last checkpoint."""


def matrix(place: Place, root: Path, changes: dict[str, Any]) -> list[Case]:
    """A run that saves at its end alone; one that saves after every rollout; and for each of its saves, what continues
    from the run directory as it stood then: as a kill leaves it."""
    seldom = _case(root / "seldom", merged(changes, {"checkpoint": {"save_interval": ROLLOUTS}}), None)

    def keep(rollout_id: int) -> None:
        shutil.copytree(root / "whole", root / f"cut-{rollout_id}")

    whole = _case(root / "whole", changes, None, keep)
    cut = [_case(root / f"cut-{after}", changes, after) for after in range(ROLLOUTS - 1)]
    return [seldom, whole, *cut]


def _case(
    run_dir: Path, changes: dict[str, Any], cut: int | None, after_save: Callable[[int], None] = lambda rollout_id: None
) -> Case:
    did = go(run_dir, changes, after_save=after_save)
    return Case(cut, did, marker(run_dir / "checkpoints", changes["loop"]["num_rollout"] - 1)["tensors"])


def continued_wrongly(place: Place, root: Path, changes: dict[str, Any]) -> dict[str, list[str]]:
    """What each sabotage of a resume is told to have changed; `nothing` is none. One run, continued many times."""
    base = root / "base"
    first = merged(changes, {"checkpoint": {"resume": "auto"}})
    go(root / "once", first, after_save=lambda done: done == 1 and shutil.copytree(root / "once", base))
    found = {}
    for name, sabotage in SABOTAGES.items():
        run_dir = root / name
        shutil.copytree(base, run_dir)
        try:
            jumps = go(run_dir, changes, sabotage=sabotage).jumps
            assert jumps is not None
            found[name] = jumps
        except ContinuityBroken as error:
            found[name] = [line.removeprefix("  - ") for line in str(error).splitlines() if line.startswith("  - ")]
            found[name].insert(0, "refused")
            assert not [e for e in journal(run_dir, "driver", "trained") if e["incarnation"] == 2]
    return found


def _actor(spec: WorkerSpec, load: LoadSpec) -> WorkerSpec:
    actor, *others = spec.slots
    return replace(spec, slots=(replace(actor, load=load), *others))


def _another_iteration(spec: WorkerSpec) -> WorkerSpec:
    return _actor(spec, replace(spec.slots[0].load, iteration=0))


def _the_reference_as_actor(spec: WorkerSpec) -> WorkerSpec:
    return _actor(spec, spec.slots[1].load)


def _the_actor_as_reference(spec: WorkerSpec) -> WorkerSpec:
    actor, ref = spec.slots
    return replace(spec, slots=(actor, replace(ref, load=actor.load)))


def _no_optimizer(spec: WorkerSpec) -> WorkerSpec:
    return replace(spec, load_optimizer=False)


SABOTAGES: dict[str, Callable[[WorkerSpec], WorkerSpec]] = {
    "nothing": lambda spec: spec,
    "another iteration": _another_iteration,
    "the reference as actor": _the_reference_as_actor,
    "the actor as reference": _the_actor_as_reference,
    "no optimizer": _no_optimizer,
}


def evaluated_only(place: Place, root: Path, changes: dict[str, Any]) -> Outcome:
    return go(root, changes)


def from_weights_alone(place: Place, root: Path, changes: dict[str, Any]) -> tuple[Outcome, Outcome]:
    """A run that saves, and one of the same length that starts from its weights."""
    first = go(root / "first", changes)
    alone = {"load": str(root / "first" / "checkpoints"), "weights_only": True}
    return first, go(root / "second", merged(changes, {"checkpoint": alone}))


def whole(place: Place, root: Path, changes: dict[str, Any]) -> Case:
    return _case(root, changes, None)


def killed_in_save(place: Place, root: Path, changes: dict[str, Any], rollout_id: int, change: int) -> None:
    """Killed at change number `change` of the file system in the save after `rollout_id`."""

    def doom(saved: int) -> None:
        if saved == rollout_id:
            die_before_change(change)

    go(root, changes, before_save=doom)


@dataclass(frozen=True)
class Pair:
    """A run of an actor and a critic, and the digest of each tensor in the last checkpoint of each."""

    did: Outcome
    final: tuple[dict[str, str], dict[str, str]]


def actor_and_critic(place: Place, root: Path, changes: dict[str, Any]) -> tuple[Pair, Pair, str]:
    """A run that saves after every rollout; what continues it where the critic's second save is lost; and what is said
    where a rank of the critic loads another than its plan says."""

    def keep(rollout_id: int) -> None:
        if rollout_id == 1:
            for name in ("lost", "wrong"):
                shutil.copytree(root / "whole", root / name)
            shutil.rmtree(root / "lost" / "checkpoints-critic" / "iter_0000001")

    whole, lost = _pair(root / "whole", changes, keep), _pair(root / "lost", changes)
    try:
        go(root / "wrong", changes, sabotage=_another_iteration_of_the_critic)
    except ContinuityBroken as error:
        return whole, lost, str(error)
    raise AssertionError("another critic went on in the place of the one that was saved")


def _another_iteration_of_the_critic(spec: WorkerSpec) -> WorkerSpec:
    return _another_iteration(spec) if spec.worker.role == Slot.CRITIC else spec


def _pair(run_dir: Path, changes: dict[str, Any], after_save: Callable[[int], None] = lambda rollout_id: None) -> Pair:
    did = go(run_dir, changes, after_save=after_save)
    last = changes["loop"]["num_rollout"] - 1
    both = [marker(run_dir / directory, last)["tensors"] for directory in ("checkpoints", "checkpoints-critic")]
    return Pair(did, (both[0], both[1]))
