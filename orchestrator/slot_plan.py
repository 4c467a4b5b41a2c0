"""Which slots a worker holds beside the actor, and what each is filled from."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator import resuming
from orchestrator.config import Config
from state import checkpoints
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """One slot, or one version of it, and what its weights were trained for."""

    slot: Slot
    version: int
    load: LoadSpec

    def __str__(self) -> str:
        return f"{self.slot}@{self.version}" if self.slot is Slot.OLD_ACTOR else self.slot


def auxiliary(config: Config, plan: ResumePlan) -> tuple[SlotLoad, ...]:
    """What is filled at start beside the actor. Raises `ResumeError`.

    Slots that change during a run come back as the checkpoint has them; the others are what the configuration says, at
    every start.
    """
    kept = _kept(config, plan)
    loads = [one for one in kept if one.slot is Slot.REF]
    if not loads and (ref := resuming.plan_ref(config)) is not None:
        loads.append(SlotLoad(Slot.REF, _trained_for(ref), ref))
    if (teacher := resuming.plan_teacher(config)) is not None:
        loads.append(SlotLoad(Slot.TEACHER, _trained_for(teacher), teacher))
    return (*loads, *(one for one in kept if one.slot is Slot.OLD_ACTOR))


def keep_old_actors(config: Config) -> int:
    """Published versions of the actor to hold; 0: there is no such slot.

    Every rollout is trained on before the second publish after it, so one version in flight is enough in a `sync` loop,
    and two where the next rollout is generated while this one is trained on.
    """
    if config.algorithm.old_logprobs != "old_actor":
        return 0
    return config.old_actor.keep or (1 if config.loop.mode == "sync" else 2)


def changing(config: Config) -> frozenset[Slot]:
    """Slots beside the actor that change during a run."""
    refreshed = config.algorithm.needs_ref and config.ref.update_interval is not None
    return frozenset(
        ([Slot.REF] if refreshed else []) + ([Slot.OLD_ACTOR] if config.algorithm.old_logprobs == "old_actor" else [])
    )


def _kept(config: Config, plan: ResumePlan) -> list[SlotLoad]:
    """Of a checkpoint of ours that the run continues from with its optimizer; weights alone begin anew."""
    if not plan.load_optimizer or plan.path is None or plan.iteration is None:
        return []
    directory = checkpoints.iteration_dir(plan.path, plan.iteration)
    if not (directory / checkpoints.MARKER).is_file():
        return []
    marker, wanted = checkpoints.read_marker(directory), changing(config)
    return [
        SlotLoad(slot, version, LoadSpec(plan.path, plan.iteration, "native", checkpoints.slot_part(slot, version)))
        for slot, version in ((Slot(entry["slot"]), int(entry["version"])) for entry in marker.get("slots", []))
        if slot in wanted
    ]


def _trained_for(load: LoadSpec) -> int:
    return 0 if load.iteration is None else load.iteration + 1
