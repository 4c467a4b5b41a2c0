"""How many prompts a rollout takes when some of their groups come to nothing.

It takes one more prompt for each group that the filter refuses or that times out, as soon as that is known, so that
engines stay busy. How many it takes in the end depends on what became of the groups, not on the order in which they
were done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.rollouts.group_work import Group


class Refill:
    """Of one rollout of `size` groups, which asks for at most `factor` times as many prompts."""

    def __init__(self, size: int, factor: float) -> None:
        self._size, self._limit = size, max(size, int(size * factor))
        self._taken = 0
        self._refused: set[int] = set()
        self._timed_out: set[int] = set()

    def wanted(self) -> int:
        """Prompts to take now."""
        missing = self._size - (self._taken - len(self._refused) - len(self._timed_out))
        n = min(missing, self._limit - self._taken)
        self._taken += n
        return n

    def count(self, group: Group, *, kept: bool) -> None:
        """A group is done; `kept` is what the filter says."""
        if group.timed_out:
            self._timed_out.add(group.prompt.group_id)
        elif not kept:
            self._refused.add(group.prompt.group_id)

    def batch(self, groups: Sequence[Group]) -> list[Group]:
        """The groups to train on, in the order of their prompts. When the limit was reached, groups that were refused
        fill the places that are left: a batch has its size whenever enough groups were generated at all."""
        there = [group for group in groups if not group.timed_out]
        refused = [group for group in there if group.prompt.group_id in self._refused]
        fill = refused[: self._size - (len(there) - len(refused))]
        left_out = {group.prompt.group_id for group in refused} - {group.prompt.group_id for group in fill}
        return [group for group in there if group.prompt.group_id not in left_out]

    def stats(self, batch: Sequence[Group]) -> dict[str, Any]:
        return {
            "rollout/prompts": self._taken,
            "rollout/groups": len(batch),
            "rollout/groups_timed_out": len(self._timed_out),
            "filter/refused": len(self._refused),
            "filter/refused_but_used": sum(group.prompt.group_id in self._refused for group in batch),
        }
