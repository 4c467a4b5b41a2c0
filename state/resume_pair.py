"""Two roles that train together continue together: from one iteration that both have, saved as one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from state.errors import ResumeError


@dataclass(frozen=True, slots=True)
class Saves:
    """The whole saves of one role: by iteration, the digest of the critic in it, or of the critic that was saved with
    it (None: not known).

    `path` as a message names it; `otherwise`: in words, what stands there that is not whole, or not of that role.
    """

    role: str
    path: str
    critics: Mapping[int, str | None]
    otherwise: str = ""

    def __str__(self) -> str:
        newest = max(self.critics, default=None)
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

    A critic that is ahead was saved just before a kill, and is left. Iterations of one number that were not saved as
    one, in two runs or two branches of one, are no pair. Raises `ResumeError` that names both where none is found, or
    `must` allows no other.
    """
    paired = pairs(actor, critic)
    if asked in paired:
        return Pair(asked)
    fault = f"{actor}, {critic}"
    if asked in actor.critics and asked in critic.critics:
        fault = f"{fault}; iteration {asked} of the critic is not the one that was saved with the actor's"
    elif asked not in critic.critics:
        fault = f"{fault}; the critic has no whole iteration {asked}, which the actor is to continue from"
    if not paired:
        raise ResumeError(
            f"actor and critic have no iteration in common: {fault}. Restore what is missing, or name where the critic "
            "was saved (critic.save in the run that saved it, critic.load in another), or begin anew from the actor's "
            f"weights: checkpoint.weights_only, checkpoint.load {actor.path}, and another checkpoint.save"
        )
    newest, before = paired[-1], [n for n in paired if n < asked]
    if must or not before:
        raise ResumeError(f"{fault}. The newest that both have is {newest}: name it with checkpoint.ckpt_step {newest}")
    back = before[-1]
    return Pair(back, f"{fault}. Both continue from iteration {back}, the newest before it that both have")


def pairs(actor: Saves, critic: Saves) -> tuple[int, ...]:
    """Iterations that were saved as one, ascending."""
    both = sorted(actor.critics.keys() & critic.critics.keys())
    return tuple(n for n in both if _fit(actor.critics[n], critic.critics[n]))


def _fit(saved_with: str | None, critic: str | None) -> bool:
    return saved_with is None or critic is None or saved_with == critic
