"""The gangs of a run as the driver sees them: the actor's, and the critic's where the algorithm has one.

    critic: values of the samples  ->  actor: advantages and returns  ->  each trains, both at once

What goes from one to the other goes from rank to rank: both gangs have one layout, so rank r of either has the same
samples. The driver holds references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.train_group import TrainGroup
from orchestrator.waiting import gather


@dataclass(frozen=True, slots=True)
class Gangs:
    """A failure on any rank of either is a failure of the call."""

    actor: TrainGroup
    critic: TrainGroup | None
    timeout_s: float

    @property
    def all(self) -> tuple[TrainGroup, ...]:
        """In the order in which they are saved: the actor's checkpoint is what a run continues from, so it is last."""
        return (self.actor,) if self.critic is None else (self.critic, self.actor)

    @property
    def handles(self) -> Mapping[str, Any]:
        """Actor handles by name, for inspectors."""
        return {name: worker for gang in self.all for name, worker in gang.handles.items()}

    @property
    def lifelines(self) -> Mapping[str, Any]:
        """By name, a call to each rank that ends with its process alone."""
        return {name: line for gang in self.all for name, line in gang.lifelines.items()}

    def init(self) -> None:
        """Fill every slot on every rank; returns with the primary live and verified everywhere."""
        self._wait("initialise", [gang.begin_init() for gang in self.all])

    def train(self, shards: Sequence[ray.ObjectRef]) -> dict[str, float]:
        """One rollout; `shards` has one reference per data-parallel rank. Returns metrics of all gangs."""
        if self.critic is None:
            return self._metrics([self.actor.begin_train(shards)])
        values = self.critic.values(shards)
        experience, targets = self.actor.experience(shards, values)
        return self._metrics([self.actor.begin_train(shards, experience), self.critic.begin_train(shards, targets)])

    def asleep(self) -> bool:
        return any(gang.asleep() for gang in self.all)

    def sleep(self) -> None:
        """Every rank releases its live weights and gradients."""
        for gang in self.all:
            gang.sleep()

    def wake(self) -> None:
        """Every rank brings its primary back, verified."""
        for gang in self.all:
            gang.wake()

    def casualties(self) -> Mapping[str, str]:
        """By name, the ranks that are dead, poisoned or silent, and why."""
        return {name: why for gang in self.all for name, why in gang.casualties().items()}

    def _metrics(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        reports = self._wait("train", calls).values()
        return {name: value for report in reports if report is not None for name, value in report.items()}

    def _wait(self, what: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The first failure surfaces at once, in whichever gang."""
        return gather({name: call for some in calls for name, call in some.items()}, what, self.timeout_s)
