"""What is known of a rank from its journal: each of its lives, which weights its slots held, and what it let out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from state import lifecycle
from state.findings import Entry
from state.slots import Slot
from state.watch import Watch

Key = tuple[Slot, int | None]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a slot was recorded to hold."""

    version: int
    digest: str
    provenance: str


@dataclass(slots=True)
class Outlet:
    """One time that bytes were let out of this rank. `ended` by `done` or `fail`. `kept`: digest of each slot that a
    save wrote beside the primary, by slot and version. `written`: a copy of them that was written in the background."""

    purpose: str
    seq: int
    transition: int
    version: int | None
    digest: str | None
    ended: bool = False
    written: bool = False
    kept: dict[tuple[str, int], str] = field(default_factory=dict)


@dataclass(slots=True)
class RankLife:
    """One incarnation of one rank. `torn`: a kill cut off the entry after the last one here."""

    incarnation: int
    world_size: int
    primary: Slot
    tiers: dict[str, str]
    identity: Entry
    watch: Watch
    state: str = "cold"
    transition: int = 0
    ready: bool = False
    torn: bool = False
    moving_to: Slot | None = None
    loading_from: str = ""
    rollout_id: int | None = None
    records: dict[Key, Weights] = field(default_factory=dict)
    outlets: dict[str, Outlet] = field(default_factory=dict)
    commits: dict[int, tuple[int, int]] = field(default_factory=dict)
    moments: list[Entry] = field(default_factory=list)
    numbered: dict[int, Entry] = field(default_factory=dict)

    @property
    def last(self) -> Entry:
        return self.moments[-1] if self.moments else self.identity

    def live(self) -> Slot | None:
        """Whose the live bytes are after the last entry."""
        slot = self.last.get("slot")
        return Slot(slot) if slot is not None and lifecycle.holds(self.state, slot) else None

    def held(self) -> Weights | None:
        """What is recorded of the live bytes; None also while the optimizer changes them."""
        slot, entry = self.live(), self.last
        if slot is None or not lifecycle.holds_as_recorded(self.state, slot) or "digest" not in entry:
            return None
        return self.records.get(key_of(slot, entry.get("version")))


@dataclass(slots=True)
class RankHistory:
    """All incarnations of one rank, in order."""

    journal: str
    role: str
    rank: int
    lives: dict[int, RankLife] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}/{self.rank}"


def key_of(slot: Slot, version: int | None) -> Key:
    return (slot, version if slot is Slot.OLD_ACTOR else None)


def row(history: RankHistory) -> dict[str, Any]:
    """The last state of a rank, as `SlotView.to_json` shows a live one."""
    life = list(history.lives.values())[-1]
    last, held = life.last, life.held()
    return {
        "worker": f"{last['run']}/{history.name}",
        "role": history.role,
        "rank": history.rank,
        "world_size": life.world_size,
        "incarnation": life.incarnation,
        "state": life.state,
        "slot": life.live(),
        "version": held.version if held else None,
        "digest": held.digest if held else None,
        "provenance": held.provenance if held else None,
        "tier": life.tiers.get(last["slot"]) if held else None,
        "since": last.get("at"),
        "transition": life.transition,
        "last_transition": last.get("trigger", "created"),
        "detail": last.get("detail", ""),
    }
