"""Two roles that train together continue together: from one iteration that both have, saved at one time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from state.errors import ResumeError


@dataclass(frozen=True, slots=True)
class Saves:
    """The whole saves of one role: by iteration, in which incarnation of the run it was made (None: not known).

    `path` as a message names it; `otherwise`: in words, what stands there that is not whole, or not of that role.
    """

    role: str
    path: str
    incarnations: Mapping[int, int | None]
    otherwise: str = ""

    def __str__(self) -> str:
        newest = max(self.incarnations, default=None)
        there = f" ({self.otherwise})" if self.otherwise else ""
        return (
            f"the {self.role}'s newest in {self.path} is {'none' if newest is None else f'iteration {newest}'}{there}"
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Where both continue from. `warning` where that is not what was asked for."""

    iteration: int
    warning: str | None = None


def pair(asked: int, actor: Saves, critic: Saves, *, must: bool) -> Pair:
    """The iteration `asked` of the actor where the critic has it too, else the newest before it that both have.

    A critic that is ahead was saved just before a kill, and is left. Iterations of one number from two branches of a
    run are no pair. Raises `ResumeError` that names both where none is found, or `must` allows no other.
    """
    paired = [n for n, made in actor.incarnations.items() if n in critic.incarnations and _fit(n, actor, critic)]
    if asked in paired:
        return Pair(asked)
    fault = f"{actor}, {critic}"
    if asked in actor.incarnations and asked in critic.incarnations:
        first, second = actor.incarnations[asked], critic.incarnations[asked]
        fault = (
            f"{fault}; iteration {asked} of the actor was saved in start {first} of its run, the critic's in {second}"
        )
    elif asked not in critic.incarnations:
        fault = f"{fault}; the critic has no whole iteration {asked}, which the actor is to continue from"
    if not paired:
        raise ResumeError(
            f"actor and critic have no iteration in common: {fault}. Restore what is missing, or begin anew from the "
            "actor's weights with checkpoint.weights_only and another checkpoint.save"
        )
    newest, before = max(paired), [n for n in paired if n < asked]
    if must or not before:
        raise ResumeError(f"{fault}. The newest that both have is {newest}: name it with checkpoint.ckpt_step {newest}")
    back = max(before)
    return Pair(back, f"{fault}. Both continue from iteration {back}, the newest before it that both have")


def _fit(iteration: int, actor: Saves, critic: Saves) -> bool:
    first, second = actor.incarnations[iteration], critic.incarnations[iteration]
    return first is None or second is None or first == second
