"""Where a run continues from: the whole decision, as functions of what was asked and what is on disk.

Nothing here reads a disk or keeps state; `state.checkpoints.inspect` does the reading. An iteration is a value that
travels in a `LoadSpec` to the one load it is meant for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from state.checkpoints import DATA, RUN_SAVES, Inventory, iteration_dir, iteration_of, parse_tracker
from state.errors import ResumeError
from state.stored import shown

LoadKind = Literal["native", "release", "huggingface", "random"]
Source = Literal["native", "release", "huggingface", "fresh"]
Mode = Literal["raw", "bridge"]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to fill one slot from. A value for one load; nothing is inherited by another."""

    path: str | None
    """Checkpoint root or Hugging Face directory; None for random weights."""
    iteration: int | None
    """Iteration under `path` for `native`, else None."""
    kind: LoadKind
    part: str | None = None
    """Directory inside the iteration, of a slot that was saved beside the actor; None: the actor's."""

    @staticmethod
    def random() -> LoadSpec:
        return LoadSpec(None, None, "random")

    def __str__(self) -> str:
        match self.kind:
            case "native":
                return f"{f'{self.part} of ' if self.part else ''}iteration {self.iteration} of {self.path}"
            case "release":
                return f"the release weights of {self.path}"
            case "huggingface":
                return f"the Hugging Face weights of {self.path}"
            case "random":
                return "random weights of model.config, from run.seed"


@dataclass(frozen=True, slots=True)
class CriticLoad:
    """What the critic is filled from. `fresh_head`: from a policy, which has no value head."""

    load: LoadSpec
    load_optimizer: bool
    fresh_head: bool

    def __str__(self) -> str:
        with_what = ", with a fresh value head" if self.fresh_head else ""
        return f"{self.load}{with_what}"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.load.path,
            "iteration": self.load.iteration,
            "load_optimizer": self.load_optimizer,
            "fresh_head": self.fresh_head,
        }


@dataclass(frozen=True, slots=True)
class NoBase:
    """There is nothing that a fresh actor could start from."""

    why: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What was asked about resuming the actor."""

    load: str | None
    """`checkpoint.load`, or `checkpoint.save` where that is unset."""
    base: LoadSpec | NoBase
    """What a fresh actor starts from."""
    ckpt_step: int | None = None
    mode: Mode = "raw"
    resume: Literal["auto", "must"] = "auto"
    weights_only: bool = False
    start_rollout_id: int | None = None
    """`loop.start_rollout_id`."""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How a run starts, and why."""

    source: Source
    load: LoadSpec
    """What the actor is filled from; with source `fresh` the base weights, whatever their kind."""
    start_rollout_id: int
    load_optimizer: bool
    load_rng: bool
    load_data: bool
    reason: str
    warnings: tuple[str, ...] = ()
    critic: CriticLoad | None = None
    """What the critic is filled from, which continues where the actor does; None where there is none."""

    @property
    def path(self) -> str | None:
        return self.load.path

    @property
    def iteration(self) -> int | None:
        return self.load.iteration

    def to_json(self) -> dict[str, Any]:
        critic = {} if self.critic is None else {"critic": self.critic.to_json()}
        return critic | {
            "source": self.source,
            "path": self.path,
            "iteration": self.iteration,
            "start_rollout_id": self.start_rollout_id,
            "load_optimizer": self.load_optimizer,
            "load_rng": self.load_rng,
            "load_data": self.load_data,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


def plan_resume(request: ResumeRequest, inventory: Inventory | None) -> ResumePlan:
    """Decide what the actor starts from. `inventory` is of `request.load`; None exactly when that is None.

    Raises `ResumeError`, with what there is and what would work.
    """
    return _with_explicit_start(_plan(request, inventory), request.start_rollout_id)


def plan_slot_load(load: str, ckpt_step: int | None, inventory: Inventory, mode: Mode, option: str) -> LoadSpec:
    """What a slot with a `load` of its own is filled from; `option` names the section in messages, as `ref`.

    A frozen slot must not drift from start to start, so nothing is guessed: what is named is there and whole, and a
    policy's unless it is for the critic, or `ResumeError`.
    """
    spec = _slot_load(load, ckpt_step, inventory, mode, option)
    if option != "critic":
        _require_policy(inventory, spec.iteration, option)
    return spec


def _slot_load(load: str, ckpt_step: int | None, inventory: Inventory, mode: Mode, option: str) -> LoadSpec:
    if inventory.is_huggingface:
        _check_huggingface(inventory, ckpt_step, mode, option)
        return LoadSpec(load, None, "huggingface")
    if inventory.is_empty:
        raise ResumeError(f"{option}.load: {load} {_absence(inventory)}")
    if ckpt_step is not None:
        return _explicit(inventory, ckpt_step, option)
    if inventory.tracker is None:
        instead = _meant(inventory, option) or f"name the iteration with {option}.ckpt_step"
        raise ResumeError(
            f"{option}.load: {load} has no tracker ({inventory.tracker_path}); {instead}. {_what_there_is(inventory)}"
        )
    named = _named(inventory)
    if named == "release" and inventory.has_release:
        return LoadSpec(load, None, "release")
    if named in inventory.complete:
        return LoadSpec(load, named, "native")
    raise ResumeError(
        f"{option}.load: the tracker {inventory.tracker_path} names {named}, {_why_not(inventory, named)}. "
        f"{_what_there_is(inventory)} Name one with {option}.ckpt_step."
    )


def _plan(request: ResumeRequest, inventory: Inventory | None) -> ResumePlan:
    if request.load is None or inventory is None:
        if request.ckpt_step is not None:
            raise ResumeError("checkpoint.ckpt_step is set, but neither checkpoint.load nor checkpoint.save is")
        if request.resume == "must":
            raise ResumeError("checkpoint.resume is `must`, but neither checkpoint.load nor checkpoint.save is set")
        return _fresh(request, "neither checkpoint.load nor checkpoint.save is set")
    if inventory.is_empty:
        missing = f"{request.load} {_absence(inventory)}"
        if request.ckpt_step is not None:
            raise ResumeError(f"checkpoint.ckpt_step asks for iteration {request.ckpt_step}, but {missing}")
        if request.resume == "must":
            raise ResumeError(f"checkpoint.resume is `must`, but {missing}")
        return _fresh(request, missing, warn=True)
    if inventory.is_huggingface:
        _check_huggingface(inventory, request.ckpt_step, request.mode, "checkpoint")
        spec = LoadSpec(request.load, None, "huggingface")
        return _weights_alone("huggingface", spec, f"{request.load} is a Hugging Face directory: weights alone")
    if request.ckpt_step is not None:
        spec = _explicit(inventory, request.ckpt_step, "checkpoint")
        return _native(request, inventory, spec.iteration, f"checkpoint.ckpt_step asks for iteration {spec.iteration}")
    if inventory.tracker is not None:
        return _from_tracker(request, inventory)
    return _without_tracker(request, inventory)


def _from_tracker(request: ResumeRequest, inventory: Inventory) -> ResumePlan:
    named = _named(inventory)
    if named == "release":
        if not inventory.has_release:
            raise ResumeError(
                f"the tracker {inventory.tracker_path} says `release`, but the release directory is not there or not "
                f"whole. {_what_there_is(inventory)}"
            )
        spec = LoadSpec(request.load, None, "release")
        return _weights_alone("release", spec, f"the tracker in {request.load} says `release`: weights alone")
    if named in inventory.complete:
        plan = _native(request, inventory, named, f"the tracker in {request.load} names iteration {named}")
        newer = [n for n in inventory.complete if n > named]
        if not newer:
            return plan
        hint = (
            f"{request.load} also holds complete iterations newer than the tracker's {named}: {_numbers(newer)}. They "
            f"are not used (a save was cut off before the tracker moved, or the run went back); "
            f"checkpoint.ckpt_step {newer[-1]} would use the newest"
        )
        return replace(plan, warnings=(*plan.warnings, hint))
    before = [n for n in inventory.complete if n < named]
    if not before:
        raise ResumeError(
            f"the tracker {inventory.tracker_path} names iteration {named}, {_why_not(inventory, named)}, and no "
            f"complete one comes before it. {_what_there_is(inventory)}"
        )
    warning = (
        f"the tracker {inventory.tracker_path} names iteration {named}, {_why_not(inventory, named)}; continuing "
        f"from iteration {before[-1]}"
    )
    return _native(request, inventory, before[-1], f"iteration {before[-1]} is the newest complete one", warning)


def _without_tracker(request: ResumeRequest, inventory: Inventory) -> ResumePlan:
    if inventory.ours:
        newest = inventory.ours[-1]
        warning = (
            f"{request.load} has no tracker (a save was cut off before it was written); continuing from its newest "
            f"complete iteration {newest}"
        )
        return _native(request, inventory, newest, f"iteration {newest} is the newest complete one", warning)
    if inventory.megatron or inventory.has_release or inventory.foreign:
        by_number = ", or name one with checkpoint.ckpt_step" if inventory.megatron else ""
        instead = _meant(inventory, "checkpoint") or f"correct checkpoint.load{by_number}"
        raise ResumeError(
            f"{request.load} has no tracker ({inventory.tracker_path}) and holds no complete iteration that Slotwise "
            f"wrote; {instead}. {_what_there_is(inventory)}"
        )
    missing = f"{request.load} holds only saves that were cut off: {_names(inventory)}"
    if request.resume == "must":
        raise ResumeError(f"checkpoint.resume is `must`, but {missing}")
    return _fresh(request, missing, warn=True)


def _native(
    request: ResumeRequest, inventory: Inventory, iteration: int | None, reason: str, *warnings: str
) -> ResumePlan:
    assert iteration is not None
    _require_policy(inventory, iteration, "checkpoint")
    spec = LoadSpec(request.load, iteration, "native")
    if request.weights_only:
        reason = f"{reason}; checkpoint.weights_only: no optimizer, random state or data cursor"
        return replace(_weights_alone("native", spec, reason), warnings=warnings)
    if iteration in inventory.without_data:
        raise ResumeError(
            f"{iteration_dir(inventory.path, iteration) / DATA} is missing or no JSON object, so prompts would "
            "repeat. Set checkpoint.weights_only to start over at rollout 0 with its weights, or name another "
            f"iteration with checkpoint.ckpt_step. {_what_there_is(inventory)}"
        )
    written_by_us = iteration in inventory.ours
    if not written_by_us:
        warnings = (*warnings, f"iteration {iteration} of {request.load} was not written by Slotwise: no data cursor")
    return ResumePlan(
        source="native",
        load=spec,
        start_rollout_id=iteration + 1,
        load_optimizer=True,
        load_rng=True,
        load_data=written_by_us,
        reason=f"{reason}: weights, optimizer, random state{' and data cursor' if written_by_us else ''}",
        warnings=warnings,
    )


def _weights_alone(source: Source, spec: LoadSpec, reason: str) -> ResumePlan:
    return ResumePlan(source, spec, 0, load_optimizer=False, load_rng=False, load_data=False, reason=reason)


def _fresh(request: ResumeRequest, why: str, warn: bool = False) -> ResumePlan:
    if isinstance(request.base, NoBase):
        raise ResumeError(f"{why}, and a fresh start is not possible: {request.base.why}")
    warnings = (f"{why}; fresh start from {request.base}",) if warn else ()
    return replace(_weights_alone("fresh", request.base, f"fresh start from {request.base}: {why}"), warnings=warnings)


def _with_explicit_start(plan: ResumePlan, start: int | None) -> ResumePlan:
    if start is None:
        return plan
    said = plan.start_rollout_id
    warnings = plan.warnings
    if start != said:
        origin = "a fresh start" if plan.source == "fresh" else f"{plan.load}"
        warnings = (*warnings, f"loop.start_rollout_id {start} wins over {said}, which follows from {origin}")
    reason = f"{plan.reason}; loop.start_rollout_id {start} wins (it would start at {said})"
    return replace(plan, start_rollout_id=start, reason=reason, warnings=warnings)


def _explicit(inventory: Inventory, iteration: int, option: str) -> LoadSpec:
    if iteration not in inventory.complete:
        raise ResumeError(
            f"{option}.ckpt_step asks for iteration {iteration} of {inventory.path}, {_why_not(inventory, iteration)}. "
            f"{_what_there_is(inventory)}"
        )
    return LoadSpec(inventory.path, iteration, "native")


def _why_not(inventory: Inventory, iteration: int | str) -> str:
    """Why an iteration that was asked for is none to load."""
    whys = [one.why for one in inventory.incomplete if one.iteration == iteration]
    whys += ["no checkpoint"] if iteration in inventory.strangers else []
    return f"which is not whole ({whys[0]})" if whys else "which is not there"


def _require_policy(inventory: Inventory, iteration: int | None, option: str) -> None:
    if iteration in inventory.critics:
        raise ResumeError(
            f"{option}.load: iteration {iteration} of {inventory.path} is of a critic, whose weights are no policy's; "
            "name the checkpoint of an actor"
        )


def _named(inventory: Inventory) -> int | Literal["release"]:
    named = parse_tracker(inventory.tracker or "")
    if named is None:
        held = "is empty" if not (inventory.tracker or "").strip() else f"holds {shown(inventory.tracker)}"
        raise ResumeError(
            f"the tracker {inventory.tracker_path} {held}; it must hold an iteration or `release`. "
            f"{_what_there_is(inventory)} Repair the file, or name an iteration with ckpt_step."
        )
    return named


def _check_huggingface(inventory: Inventory, ckpt_step: int | None, mode: Mode, option: str) -> None:
    if ckpt_step is not None:
        raise ResumeError(
            f"{option}.ckpt_step asks for iteration {ckpt_step}, but {inventory.path} is a Hugging Face directory "
            "and has no iterations"
        )
    if mode == "raw":
        raise ResumeError(
            f"{option}.load: {inventory.path} is a Hugging Face directory, and model.megatron_to_hf_mode is `raw`. "
            f"Convert it with `slotwise convert {inventory.path} OUT` and load OUT, or set the mode to `bridge`."
        )


def _meant(inventory: Inventory, option: str) -> str:
    """What would work where a directory beside that of the checkpoints was named, or nothing."""
    path = PurePath(inventory.path)
    if (iteration := iteration_of(path.name)) is not None:
        return f"did you mean {path.parent} with {option}.ckpt_step {iteration}"
    return f"did you mean {path / RUN_SAVES}" if RUN_SAVES in inventory.foreign else ""


def _absence(inventory: Inventory) -> str:
    return "has nothing in it" if inventory.exists else "does not exist"


def _what_there_is(inventory: Inventory) -> str:
    parts = []
    if inventory.complete:
        parts.append(f"complete iterations {_numbers(inventory.complete)}")
    if inventory.has_release:
        parts.append("release weights")
    if inventory.incomplete:
        parts.append(f"cut-off saves {_names(inventory)}")
    if inventory.foreign:
        shown = ", ".join(inventory.foreign[:5]) + (", ..." if len(inventory.foreign) > 5 else "")
        parts.append(f"other files ({shown})")
    return f"There: {'; '.join(parts) or 'nothing'}."


def _numbers(iterations: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, iterations))


def _names(inventory: Inventory) -> str:
    return ", ".join(map(str, inventory.incomplete))
