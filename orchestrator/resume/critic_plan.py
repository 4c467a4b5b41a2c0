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
from state.resume_pair import Saves, pair, pairs
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
    saves = save_root(config, own)
    _require_room(saves, own)
    if not made.load_optimizer:
        left = _left_behind(made, saves)
        return replace(made, critic=_beginning(config, made), warnings=(*made.warnings, *left))
    assert made.path is not None
    assert made.iteration is not None
    root = Path(made.path)
    if own is not None and root == own:
        assert saves is not None
        both = _together(config, made, checkpoints.inspect(saves), replan)
        began = config.critic.load is not None and Path(config.critic.load).absolute() != saves
        return replace(both, reason=f"{both.reason}; critic.load is for its first start") if began else both
    if config.critic.load is None:
        return _together(config, made, checkpoints.inspect(_beside(root)), replan)
    given = _inspect_given(config.critic.load)
    if _is_policy(given):
        return replace(made, critic=_given(config, given))
    if given.ours and not given.critics:
        raise ResumeError(
            f"critic.load: {given.path} holds an actor's iterations and no critic's. Leave it out to continue with the "
            f"critic that was saved with the actor ({_beside(root)}), or name where a critic was saved"
        )
    if config.critic.ckpt_step not in (None, made.iteration):
        raise ResumeError(
            f"the actor continues from iteration {made.iteration} of {root}, and critic.ckpt_step asks for iteration "
            f"{config.critic.ckpt_step} of {given.path}: both have to continue from one. Name one checkpoint.ckpt_step "
            "for both, and leave out critic.ckpt_step"
        )
    return _together(config, made, given, replan, "critic.load ")


def _together(
    config: Config, made: ResumePlan, critics: Inventory, replan: Callable[[int], ResumePlan], option: str = ""
) -> ResumePlan:
    """Both continue from one iteration. `option` led to `critics`."""
    assert made.path is not None
    assert made.iteration is not None
    must = config.checkpoint.resume == "must" or config.checkpoint.ckpt_step is not None
    actor = _saves(checkpoints.inspect(made.path), Slot.ACTOR)
    found = pair(made.iteration, actor, _saves(critics, Slot.CRITIC, option), must=must)
    if found.warning is not None:
        made = replan(found.iteration)
        reason = f"iteration {found.iteration} is the newest that actor and critic both have: {_what(made)}"
        made = replace(made, reason=reason, warnings=(found.warning, *made.warnings))
    load = LoadSpec(critics.path, found.iteration, "native")
    return replace(made, critic=CriticLoad(load, load_optimizer=True, fresh_head=False))


def _require_room(saves: Path | None, actor: Path | None) -> None:
    """`ResumeError` where a critic's checkpoint would be written over what is not a critic's."""
    if saves is None or actor is None:
        return
    there = checkpoints.inspect(saves)
    held = [f"iteration {n}, which is of an actor" for n in there.ours if n not in there.critics]
    held += _of_others(there, actor)
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


def _of_others(there: Inventory, actor: Path) -> list[str]:
    """In words, the critics in `there` that were not saved with `actor`; none where one of them was: a directory that
    was copied or moved is its run's still."""
    if pairs(_saves(checkpoints.inspect(actor), Slot.ACTOR), _saves(there, Slot.CRITIC)):
        return []
    saved_with = {n: checkpoints.read_marker(checkpoints.iteration_dir(there.path, n)).actor for n in there.critics}
    return [
        f"iteration {n} of the critic of another run ({root or 'it does not say which'})"
        for n, root in saved_with.items()
        if root != str(actor)
    ]


def _left_behind(made: ResumePlan, saves: Path | None) -> tuple[str, ...]:
    """In words, that a critic was saved where this run saves its own, and is not continued with."""
    held = checkpoints.inspect(saves).critics if saves is not None else ()
    if not held or (made.path is not None and _beside(Path(made.path)) == saves):
        return ()
    return (
        f"{saves} holds a critic's iterations up to {held[-1]}, and no actor's stand beside them: they are not "
        "continued with, and this run saves over them",
    )


def _beginning(config: Config, made: ResumePlan) -> CriticLoad:
    """Weights alone: what the actor begins with, unless there is something of a critic's own."""
    if config.critic.load is not None:
        return _given(config, _inspect_given(config.critic.load))
    if made.source == "native" and made.path is not None and made.iteration is not None:
        beside = checkpoints.inspect(_beside(Path(made.path)))
        if damaged := [str(one) for one in beside.incomplete if one.iteration == made.iteration]:
            raise ResumeError(
                f"the critic of iteration {made.iteration} in {beside.path} is not whole: {damaged[0]}. Name another "
                "iteration with checkpoint.ckpt_step, or what the critic begins with with critic.load"
            )
        if made.iteration in beside.critics:
            return CriticLoad(LoadSpec(beside.path, made.iteration, "native"), load_optimizer=False, fresh_head=False)
    return CriticLoad(made.load, load_optimizer=False, fresh_head=True)


def _given(config: Config, inventory: Inventory) -> CriticLoad:
    """Weights of `critic.load`."""
    mode = config.model.megatron_to_hf_mode
    load = plan_slot_load(inventory.path, config.critic.ckpt_step, inventory, mode, "critic")
    return CriticLoad(load, load_optimizer=False, fresh_head=load.iteration not in inventory.critics)


def _inspect_given(load: str) -> Inventory:
    inventory = checkpoints.inspect(Path(load).absolute())
    if inventory.is_empty:
        raise ResumeError(
            f"critic.load: {inventory.path} {'has nothing in it' if inventory.exists else 'does not exist'}"
        )
    return inventory


def _is_policy(inventory: Inventory) -> bool:
    """Whether there are weights without an iteration of a run: what `slotwise convert` made, or Hugging Face's."""
    return inventory.is_huggingface or (inventory.has_release and not inventory.ours)


def _saves(inventory: Inventory, role: Slot, option: str = "") -> Saves:
    """What `role` can continue from. The actor needs its data cursor for that, too."""
    of_critic = role is Slot.CRITIC
    usable = [n for n in inventory.ours if (n in inventory.critics) is of_critic and n not in inventory.without_data]
    markers = {n: checkpoints.read_marker(checkpoints.iteration_dir(inventory.path, n)) for n in usable}
    alone = [n for n, marker in markers.items() if not of_critic and marker.critic is None]
    critics: dict[int, str | None] = dict.fromkeys(() if of_critic else inventory.megatron)
    critics |= {n: m.digest if of_critic else m.critic for n, m in markers.items() if n not in alone}
    others = "an actor's" if of_critic else "a critic's"
    otherwise = [] if inventory.exists else ["it does not exist"]
    otherwise += [f"iteration {n} is {others}" for n in inventory.ours if (n in inventory.critics) is not of_critic][
        -1:
    ]
    otherwise += [f"iteration {n} was saved without a critic" for n in alone][-1:]
    otherwise += [f"iteration {n} has no data cursor" for n in inventory.without_data][-1:]
    otherwise += [str(one) for one in inventory.incomplete][-1:]
    return Saves(role, f"{option}{inventory.path}", critics, "; ".join(otherwise))


def _what(plan: ResumePlan) -> str:
    return f"weights, optimizer, random state{' and data cursor' if plan.load_data else ''}"


def _beside(actor: Path) -> Path:
    return Path(os.path.normpath(actor) + BESIDE)
