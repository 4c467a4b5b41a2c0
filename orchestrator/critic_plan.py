"""Where the critic's checkpoints are, and what it starts from beside the actor: reads directories, decides little."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.config import Config
from state import checkpoints
from state.checkpoints import Inventory
from state.errors import ResumeError
from state.resume import CriticLoad, LoadSpec, ResumePlan, plan_slot_load
from state.resume_pair import Saves, pair
from state.slots import Slot

BESIDE = "-critic"
"""Ends the directory of a critic's checkpoints, where nobody names one."""


def save_root(config: Config, actor: Path | None) -> Path | None:
    """Absolute directory of the critic's checkpoints, for an actor that saves into `actor`; None: nothing is saved."""
    if actor is None or not config.algorithm.needs_critic:
        return None
    return Path(config.critic.save).absolute() if config.critic.save else _beside(actor)


def with_critic(config: Config, made: ResumePlan, own: Path | None, replan: Callable[[int], ResumePlan]) -> ResumePlan:
    """`made`, the actor's, with what the critic starts from; from another iteration where the critic lacks that one.

    `own`: where the run's actor is saved. `replan`: the actor's plan from an iteration. Raises `ResumeError`.
    """
    _require_room(save_root(config, own), own)
    if not made.load_optimizer:
        return replace(made, critic=_beginning(config, made))
    assert made.path is not None
    assert made.iteration is not None
    root, given = Path(made.path), config.critic.load
    continues = own is not None and root == own
    beside = save_root(config, own) if continues else (Path(given).absolute() if given else _beside(root))
    assert beside is not None
    inventory = checkpoints.inspect(beside)
    if not continues and given is not None and _is_policy(inventory):
        return replace(made, critic=_given(config, inventory))
    critic = _saves(inventory, Slot.CRITIC)
    asked, must = made.iteration, config.checkpoint.resume == "must" or config.checkpoint.ckpt_step is not None
    if not continues and config.critic.ckpt_step not in (None, asked):
        raise ResumeError(
            f"the actor continues from iteration {asked} of {root}, and critic.ckpt_step asks for iteration "
            f"{config.critic.ckpt_step} of {beside}: both have to continue from one. Name one checkpoint.ckpt_step for "
            "both, and leave out critic.ckpt_step"
        )
    found = pair(asked, _saves(checkpoints.inspect(root), Slot.ACTOR), critic, must=must)
    if found.warning is not None:
        made = replan(found.iteration)
        reason = f"iteration {found.iteration} is the newest that actor and critic both have: {_what(made)}"
        made = replace(made, reason=reason, warnings=(found.warning, *made.warnings))
    load = LoadSpec(str(beside), found.iteration, "native")
    return replace(made, critic=CriticLoad(load, load_optimizer=True, fresh_head=False))


def require_actor(load: LoadSpec, option: str) -> None:
    """Raises `ResumeError` where `load` is a critic's checkpoint."""
    if _role(load) == Slot.CRITIC:
        raise ResumeError(f"{option}: {load} is of a critic, whose weights are no policy's; name one of an actor")


def _require_room(saves: Path | None, actor: Path | None) -> None:
    """`ResumeError` where a critic's checkpoint would be written over what is not a critic's."""
    if saves is None or actor is None:
        return
    there = checkpoints.inspect(saves)
    roles = {n: checkpoints.read_marker(checkpoints.iteration_dir(saves, n)).role for n in there.ours}
    held = [f"iteration {n}, which is of the {role}" for n, role in roles.items() if role != Slot.CRITIC]
    held += [f"iteration {n}, which is Megatron's own" for n in there.megatron]
    held += ["a converted checkpoint"] if there.has_release else []
    held += [f"{name}, which is no checkpoint of ours" for name in there.foreign]
    if there.exists and actor.exists() and saves.samefile(actor):
        held = [f"what is saved as the actor's in {actor}: both are one directory"]
    if held:
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        raise ResumeError(
            f"critic.save: {saves} holds {held[0]}{more}; the critic would write over it. Name a directory of its own, "
            "or leave critic.save out"
        )


def _beginning(config: Config, made: ResumePlan) -> CriticLoad:
    """Weights alone: what the actor begins with, unless there is something of a critic's own."""
    if config.critic.load is not None:
        return _given(config, checkpoints.inspect(Path(config.critic.load).absolute()))
    if made.source == "native" and made.path is not None and made.iteration is not None:
        load = LoadSpec(str(_beside(Path(made.path))), made.iteration, "native")
        if _role(load) == Slot.CRITIC:
            return CriticLoad(load, load_optimizer=False, fresh_head=False)
    return CriticLoad(made.load, load_optimizer=False, fresh_head=True)


def _given(config: Config, inventory: Inventory) -> CriticLoad:
    """Weights of `critic.load`."""
    mode = config.model.megatron_to_hf_mode
    load = plan_slot_load(inventory.path, config.critic.ckpt_step, inventory, mode, "critic")
    return CriticLoad(load, load_optimizer=False, fresh_head=_role(load) != Slot.CRITIC)


def _is_policy(inventory: Inventory) -> bool:
    """Whether there are weights without an iteration of a run: what `slotwise convert` made, or Hugging Face's."""
    return inventory.is_huggingface or (inventory.has_release and not inventory.ours)


def _saves(inventory: Inventory, role: Slot) -> Saves:
    incarnations: dict[int, int | None] = dict.fromkeys(inventory.megatron if role is Slot.ACTOR else ())
    for iteration in inventory.ours:
        marker = checkpoints.read_marker(checkpoints.iteration_dir(inventory.path, iteration))
        if marker.role == role:
            incarnations[iteration] = marker.incarnation
    return Saves(role, inventory.path, incarnations)


def _role(load: LoadSpec) -> str | None:
    """Whose checkpoint of ours it is; None where it is not one, or not there."""
    if load.kind != "native" or load.path is None or load.iteration is None:
        return None
    directory = checkpoints.iteration_dir(load.path, load.iteration)
    if not (directory / checkpoints.MARKER).is_file():
        return None
    return checkpoints.read_marker(directory).role


def _what(plan: ResumePlan) -> str:
    return f"weights, optimizer, random state{' and data cursor' if plan.load_data else ''}"


def _beside(actor: Path) -> Path:
    return Path(os.path.normpath(actor) + BESIDE)
