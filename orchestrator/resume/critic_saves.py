"""Where a critic is saved, beside its actor, and what stands there: reads directories."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.config import Config
from state import checkpoints
from state.checkpoints import Inventory, same_place
from state.errors import ResumeError
from state.resume import CriticLoad
from state.resume_pair import Saves, pairs
from state.slots import Slot

BESIDE = "-critic"
"""Ends the directory of a critic's checkpoints, where nobody names one."""


def save_root(config: Config, actor: Path | None) -> Path | None:
    """Absolute directory of the critic's checkpoints, for an actor that saves into `actor`; None: nothing is saved."""
    if actor is None or not config.algorithm.needs_critic:
        return None
    return Path(config.critic.save).absolute() if config.critic.save else beside(actor)


def beside(actor: Path) -> Path:
    """Where the critic of an actor in `actor` is saved, unless told otherwise."""
    return Path(os.path.normpath(actor) + BESIDE)


def saves(inventory: Inventory, role: Slot, option: str = "", *, with_megatrons: bool = False) -> Saves:
    """What `role` can continue from; `option` led to it. The actor needs its data cursor for that, too.

    `with_megatrons`: iterations that Megatron itself wrote too, which name no critic, so that anyone's would fit.
    """
    of_critic = role is Slot.CRITIC
    of_role = [n for n in inventory.ours if (n in inventory.critics) is of_critic]
    usable = [n for n in of_role if n not in inventory.without_data]
    markers = {n: checkpoints.read_marker(checkpoints.iteration_dir(inventory.path, n)) for n in usable}
    alone = [n for n, marker in markers.items() if not of_critic and marker.critic is None]
    critics: dict[int, str | None] = dict.fromkeys(inventory.megatron if with_megatrons else ())
    critics |= {n: m.digest if of_critic else m.critic for n, m in markers.items() if n not in alone}
    newest_of = {
        f"is {'an actor' if of_critic else 'a critic'}'s": [n for n in inventory.ours if n not in of_role],
        "was saved without a critic": alone,
        "has no data cursor": inventory.without_data,
        "is Megatron's own, which names no critic": () if with_megatrons else inventory.megatron,
    }
    otherwise = [] if inventory.exists else ["it does not exist"]
    otherwise += [f"iteration {some[-1]} {what}" for what, some in newest_of.items() if some]
    otherwise += [str(one) for one in inventory.incomplete[-1:]]
    return Saves(role, f"{option}{inventory.path}", critics, "; ".join(otherwise))


def require_room(root: Path | None, actor: Path | None, named: str | None) -> None:
    """`ResumeError` where a critic's checkpoint would be written over what is not this run's critic's. `named`:
    `critic.save`."""
    if root is None or actor is None:
        return
    there = checkpoints.inspect(root)
    held = [f"iteration {n}, which is of an actor" for n in there.ours if n not in there.critics]
    held += _of_others(there, actor)
    held += [f"iteration {n}, which is Megatron's own" for n in there.megatron]
    held += ["a converted checkpoint"] if there.has_release else []
    # Other files in a directory of ours do no harm.
    taken = [checkpoints.iteration_dir("", n).name for n in there.strangers]
    strangers = taken if there.critics else there.foreign
    held += [f"{name}, which is no checkpoint of ours" for name in strangers]
    if same_place(root, actor):
        held = [f"what is saved as the actor's in {actor}: both are one directory"]
    if held:
        more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
        advice = "or leave critic.save out" if named else "since a critic is saved beside its actor where none is named"
        raise ResumeError(
            f"critic.save: {root} holds {held[0]}{more}; the critic would be saved over it. Put there what was saved "
            f"with the actor in {actor}, if anything was, or name a directory of its own with critic.save, {advice}"
        )


def _of_others(there: Inventory, actor: Path) -> list[str]:
    """In words, the critics in `there` that were not saved with `actor`; none where one of them was: a directory that
    was copied or moved is its run's still."""
    if pairs(saves(checkpoints.inspect(actor), Slot.ACTOR), saves(there, Slot.CRITIC)):
        return []
    saved_with = {n: checkpoints.read_marker(checkpoints.iteration_dir(there.path, n)).actor for n in there.critics}
    return [
        f"iteration {n} of the critic that was saved with the actor in {its_actor or 'a directory it does not name'}"
        for n, its_actor in saved_with.items()
        if its_actor != str(actor)
    ]


def left_behind(begins: CriticLoad, root: Path | None) -> tuple[str, ...]:
    """In words, that a critic was saved where this run saves its own, and is not what this one `begins` with."""
    held = checkpoints.inspect(root).critics if root is not None else ()
    if not held or same_place(begins.load.path, root):
        return ()
    return (
        f"{root} holds a critic's iterations up to {held[-1]}: they are not continued with, and this run saves over "
        "them",
    )
