"""The life of a rollout engine as a machine: what it may be asked to do, and which weights it was proven to hold.

Only an engine in `serving` has weights to its name, and it gets them by `commit` alone. Every status is an immutable
value that is replaced at each transition, so that readers never wait and never see half a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transitions import Machine, MachineError

from state.errors import InvariantViolation
from state.slots import WeightId


class EnginePhase(StrEnum):
    """Where an engine stands between a publish and the requests it may answer."""

    STARTING = "starting"
    STALE = "stale"
    UPDATING = "updating"
    SERVING = "serving"
    ASLEEP = "asleep"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What is known about an engine after its transition number `transition`.

    `weights` is the proven (incarnation, version) and is set only while serving; `publish_id` is the update under way
    or the one that proved the weights; `reason` says why the engine serves nothing.
    """

    engine_id: str
    phase: EnginePhase
    weights: WeightId | None = None
    publish_id: str | None = None
    reason: str | None = None
    transition: int = 0


@dataclass(frozen=True, slots=True)
class EngineTransition:
    """One step of an engine's life, for the journal."""

    trigger: str
    source: EnginePhase
    status: EngineStatus


class EngineLifeError(InvariantViolation):
    """An engine was to serve, or to be updated, out of order."""


_LIVING = [phase.value for phase in EnginePhase if phase is not EnginePhase.DEAD]
_TRANSITIONS: list[dict[str, Any]] = [
    {"trigger": "started", "source": "starting", "dest": "stale"},
    {"trigger": "begin_update", "source": ["stale", "serving"], "dest": "updating"},
    {"trigger": "commit", "source": "updating", "dest": "serving"},
    {"trigger": "abort", "source": "updating", "dest": "stale"},
    {"trigger": "withdraw", "source": ["stale", "serving"], "dest": "stale"},
    {"trigger": "sleep", "source": "serving", "dest": "asleep"},
    {"trigger": "wake", "source": "asleep", "dest": "stale"},
    {"trigger": "die", "source": _LIVING, "dest": "dead"},
]


def _sources(way: dict[str, Any]) -> list[str]:
    source = way["source"]
    return [source] if isinstance(source, str) else source


def next_phase(phase: str, trigger: str) -> str | None:
    """Where `trigger` leads from `phase`, or None if it may not happen there. Pure: journals are audited with it."""
    for way in _TRANSITIONS:
        if way["trigger"] == trigger and phase in _sources(way):
            return str(way["dest"])
    return None


class EngineLife:
    """One engine's machine. `record` is called with each transition after it happened."""

    def __init__(self, engine_id: str, record: Callable[[EngineTransition], None]) -> None:
        self._status = EngineStatus(engine_id, EnginePhase.STARTING)
        self._newest: WeightId | None = None
        self._record = record
        self._machine = Machine(
            states=[phase.value for phase in EnginePhase],
            initial=EnginePhase.STARTING.value,
            transitions=_TRANSITIONS,
            auto_transitions=False,
        )

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def alive(self) -> bool:
        return self._status.phase is not EnginePhase.DEAD

    def serves(self, weights: WeightId) -> bool:
        """Whether requests for exactly these weights may go to this engine."""
        return self._status.phase is EnginePhase.SERVING and self._status.weights == weights

    def refuse_older(self, weights: WeightId) -> None:
        """Weights never go back: `EngineLifeError` if it has served newer ones."""
        if self._newest is not None and weights < self._newest:
            raise EngineLifeError(
                f"{self._status.engine_id} has held weights {self._newest} and cannot go back to {weights}"
            )

    def started(self) -> None:
        """The engine answers; it holds no weights that anyone published."""
        self._fire("started", reason="never published to")

    def begin_update(self, publish_id: str, weights: WeightId) -> None:
        """From here its bytes may change, and it serves nothing until `commit`. Raises as `refuse_older`."""
        self.refuse_older(weights)
        self._fire("begin_update", publish_id=publish_id)

    def commit(self, publish_id: str, weights: WeightId) -> None:
        """The engine was proven to hold `weights`. Raises as `refuse_older`."""
        if self._status.phase is EnginePhase.UPDATING and self._status.publish_id != publish_id:
            raise EngineLifeError(
                f"{self._status.engine_id} is being updated by publish {self._status.publish_id}, not by {publish_id}"
            )
        self.refuse_older(weights)
        self._fire("commit", publish_id=publish_id, weights=weights)
        self._newest = weights

    def abort(self, reason: str) -> None:
        """The update came to nothing; what the engine holds is unknown."""
        self._fire("abort", reason=reason)

    def withdraw(self, reason: str) -> None:
        """Takes an engine out of service that no update has touched."""
        self._fire("withdraw", reason=reason)

    def sleep(self) -> None:
        self._fire("sleep", reason="asleep")

    def wake(self) -> None:
        """A woken engine has lost its weights."""
        self._fire("wake", reason="woken without weights")

    def die(self, reason: str) -> None:
        self._fire("die", reason=reason)

    def _fire(
        self,
        trigger: str,
        *,
        weights: WeightId | None = None,
        publish_id: str | None = None,
        reason: str | None = None,
    ) -> None:
        before = self._status
        try:
            self._machine.trigger(trigger)
        except MachineError as error:
            because = f" ({before.reason})" if before.reason else ""
            raise EngineLifeError(f"{before.engine_id} is {before.phase}{because}: it cannot {trigger}") from error
        self._status = EngineStatus(
            engine_id=before.engine_id,
            phase=EnginePhase(self._machine.state),
            weights=weights,
            publish_id=publish_id,
            reason=reason,
            transition=before.transition + 1,
        )
        self._record(EngineTransition(trigger, before.phase, self._status))
