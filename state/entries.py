"""What each kind of journal entry holds. Readers of journals rely on it: an entry that is not so is none.

`fault` is asked of every entry that is read back; an entry that it finds nothing wrong with has every field that its
kind and trigger promise, of the promised type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from state.slots import Slot
from state.stored import Count, Stored, check

Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
"""Also of how many ranks there are: no gang is larger, and nobody counts to more."""
# The name of a slot.
_Slot = Annotated[Slot, Field(strict=False)]


class Entry(Stored):
    """Of any journal. `at`: wall time in seconds."""

    seq: int
    kind: str
    source: str
    at: float


# ---- the driver's ----------------------------------------------------------------------------------------------------


class DriverStarted(Entry):
    incarnation: Count
    start_rollout_id: Count | None
    pid: int


class GangRebuild(Entry):
    incarnation: Count


class GangFailed(Entry):
    incarnation: Count
    ranks: dict[str, str]
    reason: str
    rebuild: bool
    why: str


class Plan(Stored):
    source: str
    path: str | None
    iteration: Count | None
    start_rollout_id: Count
    load_optimizer: bool


class GangStarted(Entry):
    role: str
    incarnation: Count
    world_size: Rank
    resume: Plan


class Continuity(Entry):
    same_dtype: bool
    held: dict[str, str]
    jumps: list[str]


class RefusedPublish(Entry):
    """Refused before there was a quorum."""

    publish_id: str
    outcome: Literal["refused"]
    reason: str = ""


class Agreed(Entry):
    """What a gang agreed on."""

    publish_id: str
    incarnation: Count
    version: Count
    digest: str
    transitions: list[int]
    summaries: list[str]
    replicas: list[int] = Field(default_factory=list)


class Publish(Agreed):
    outcome: Literal["committed", "aborted", "refused"]
    slot: _Slot
    engines: dict[str, str]
    reason: str = ""


class KeptSlot(Stored):
    slot: _Slot
    version: Count
    digest: str
    summaries: list[str]


class Save(Agreed):
    iteration: Count
    slots: list[KeptSlot]
    path: str


class Trained(Entry):
    rollout_id: Count
    version: Count
    behaviour: list[Count]


class RunEnded(Entry):
    outcome: Literal["done", "failed"]
    reason: str = ""


# ---- a worker's ------------------------------------------------------------------------------------------------------


class OfRank(Entry):
    role: str
    rank: Rank
    incarnation: Count


class Created(OfRank):
    run: str
    world_size: Rank
    slots: dict[str, str]
    primary: _Slot
    kept: list[_Slot]


class Transition(OfRank):
    run: str
    transition: int
    trigger: str
    before: str
    after: str
    slot: _Slot
    version: int | None = None
    digest: str | None = None
    live: str | None = None
    recorded: str | None = None
    provenance: str = ""
    detail: str = ""
    publish_id: str = ""
    rollout_id: int = 0


class AboutWeights(Transition):
    version: int
    digest: str


class LetOut(AboutWeights):
    publish_id: str


class Step(AboutWeights):
    rollout_id: int


class Commit(Step):
    wrote: bool


class Unchanged(AboutWeights):
    wrote: bool


class Snapshot(OfRank):
    slot: _Slot
    version: int
    digest: str
    live: str | None = None


class Resting(Stored):
    slot: _Slot
    version: int
    digest: str
    live: str


class Attested(OfRank):
    transition: int
    state: str
    slot: _Slot | None
    version: int | None
    digest: str | None
    live: str | None
    changed: list[str]
    kept: list[Resting]


class Kept(OfRank):
    publish_id: str
    slot: _Slot
    version: int
    digest: str


class Refusal(OfRank):
    what: str
    lent: bool


class Written(OfRank):
    publish_id: str


class WriteFailed(OfRank):
    publish_id: str
    reason: str


# ---- an engine's -----------------------------------------------------------------------------------------------------


class Engine(Entry):
    engine: str
    transition: int
    trigger: str
    before: str
    state: str
    incarnation: int | None
    version: int | None
    publish_id: str | None
    reason: str | None


class Proof(Entry):
    engine: str
    publish_id: str
    digest: str


_DRIVER: Mapping[str, type[Entry]] = {
    "driver_started": DriverStarted,
    "gang_rebuild": GangRebuild,
    "gang_failed": GangFailed,
    "gang_started": GangStarted,
    "continuity": Continuity,
    "save_begun": Save,
    "save": Save,
    "trained": Trained,
    "run_ended": RunEnded,
}
_WORKER: Mapping[str, type[Entry]] = {
    "created": Created,
    "snapshot": Snapshot,
    "attested": Attested,
    "kept": Kept,
    "refusal": Refusal,
    "written": Written,
    "write_failed": WriteFailed,
}
_TRIGGERS: Mapping[Any, type[Entry]] = {
    "loaded": AboutWeights,
    "ready": AboutWeights,
    "switched": AboutWeights,
    "sleep": AboutWeights,
    "step": Step,
    "commit": Commit,
    "unchanged": Unchanged,
    "publish": LetOut,
    "save": LetOut,
    "done": LetOut,
}
_ENGINE: Mapping[str, type[Entry]] = {"engine": Engine, "proof": Proof}


def role_of(entry: Mapping[str, Any]) -> str:
    """Whose gang an entry of the driver is about."""
    return str(entry.get("role", Slot.ACTOR))


def fault(entry: Mapping[str, Any]) -> str | None:
    """In words, what is wrong with an entry by itself; None: it is whole. Kinds that nobody reads may hold anything."""
    whose, kind = _type(entry)
    wrong = check(kind, entry)
    return None if wrong is None else f"not an entry of {whose}: {wrong}"


def _type(entry: Mapping[str, Any]) -> tuple[str, type[Entry]]:
    kind = entry.get("kind")
    match kind:
        case "publish":
            return "the driver", Publish if "digest" in entry else RefusedPublish
        case "transition":
            trigger = entry.get("trigger")
            return "a worker", _TRIGGERS.get(trigger, Transition) if isinstance(trigger, str) else Transition
        case str():
            for whose, table in (("the driver", _DRIVER), ("a worker", _WORKER), ("an engine", _ENGINE)):
                if kind in table:
                    return whose, table[kind]
    return "a journal", Entry
