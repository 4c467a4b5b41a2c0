"""One lane of the page: what one rank or engine was, from one journal entry to the next."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.inspector.codes import CODES, code
from orchestrator.inspector.tail import Line, Tail
from state.lifecycle import holds, holds_as_recorded
from state.slots import Provenance

Entry = Mapping[str, Any]
SHUT_DOWN = "shut down"
"""How the fleet says that an engine's end was wanted."""


@dataclass(slots=True)
class Lane:
    """Holds times, states and where in the journal they are told; the entries themselves stay on disk."""

    name: str
    kind: Literal["rank", "engine"]
    tail: Tail
    times: array[float] = field(default_factory=lambda: array("d"))
    codes: array[int] = field(default_factory=lambda: array("B"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    versions: list[int | None] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    _last: Entry = field(default_factory=dict)
    _life: Entry = field(default_factory=dict)
    _origins: list[tuple[int, str, int, str]] = field(default_factory=list)
    _loading_from: str = ""

    @property
    def rank(self) -> int | None:
        """Of a rank's lane."""
        return self._life.get("rank")

    def created(self, line: Line) -> None:
        """A rank's machine begins a new life."""
        self._life = line.entry
        self._append(line, "cold")

    def moved(self, line: Line) -> None:
        """A transition of a rank's machine."""
        entry = line.entry
        match entry.get("trigger"):
            case "load":
                self._loading_from = str(entry.get("provenance", ""))
            case "loaded":
                self._origin(entry, self._loading_from)
            case "commit":
                self._origin(entry, str(Provenance.step(int(entry.get("rollout_id", 0)))))
        self._append(line, str(entry.get("after")))

    def snapshot(self, line: Line) -> None:
        """A slot was filled from the resident actor; nothing moved."""
        self._origin(line.entry, str(Provenance.snapshot(int(line.entry.get("version", 0)))))

    def engine(self, line: Line) -> None:
        """A transition of an engine's life."""
        ended = line.entry.get("reason") == SHUT_DOWN
        self._append(line, "none" if ended else str(line.entry.get("state")))

    def row(self) -> dict[str, Any]:
        """The newest state, as `SlotView.to_json` and the fleet's rows say it."""
        entry = self._last
        if self.kind == "engine":
            told = {key: entry.get(key) for key in ("state", "version", "incarnation", "publish_id", "reason")}
            return {"engine": self.name, **told, "since": entry.get("at")}
        state = str(entry.get("after", "cold"))
        slot = str(entry.get("slot"))
        of = entry if holds_as_recorded(state, slot) else {}
        return {
            "worker": f"{entry.get('run')}/{self.name}",
            **{key: entry.get(key) for key in ("role", "rank", "world_size", "incarnation")},
            "state": state,
            "slot": slot if holds(state, slot) else None,
            "version": of.get("version"),
            "digest": of.get("digest"),
            "provenance": self.origin(str(of["slot"]), of.get("version"), len(self.times)) if of else None,
            "tier": self._tier(of.get("slot")),
            "since": entry.get("at"),
            "transition": entry.get("transition", 0),
            "last_transition": entry.get("trigger", "created"),
            "detail": entry.get("detail", ""),
        }

    def index_at(self, time: float) -> int:
        """Of the segment that `time` is in; -1 before the first."""
        return bisect_right(self.times, time) - 1

    def tell(self, index: int) -> dict[str, Any]:
        """Everything about one segment, for people."""
        entry = self.tail.at(self.offsets[index])
        slot = entry.get("slot")
        told = {
            "lane": self.name,
            "index": index,
            "start": self.times[index],
            "end": self.times[index + 1] if index + 1 < len(self.times) else None,
            "state": entry.get("after", entry.get("state", CODES[self.codes[index]])),
            "trigger": entry.get("trigger", entry.get("kind")),
            "reason": entry.get("detail") or entry.get("reason"),
        }
        told |= {key: entry.get(key) for key in _TOLD}
        if self.kind == "rank" and slot is not None:
            told["tier"] = self._tier(slot)
            told["provenance"] = entry.get("provenance") or self.origin(str(slot), entry.get("version"), index)
        return told

    def origin(self, slot: str, version: int | None, before: int) -> str | None:
        """Where the bytes of `slot` came from that were there at segment `before`."""
        for index, filled, of, text in reversed(self._origins):
            if index <= before and filled == slot and version in (None, of):
                return text
        return None

    def _origin(self, entry: Entry, text: str) -> None:
        self._origins.append((len(self.times), str(entry.get("slot")), int(entry.get("version", 0)), text))

    def _tier(self, slot: Any) -> str | None:
        tier = self._life.get("slots", {}).get(slot)
        return None if tier is None else str(tier)

    def _append(self, line: Line, state: str) -> None:
        self._last, at = line.entry, float(line.entry["at"])
        # Clocks may be set back; a lane only goes on.
        self.times.append(max(at, self.times[-1]) if self.times else at)
        self.codes.append(code(state))
        self.present.add(self.codes[-1])
        self.offsets.append(line.offset)
        self.versions.append(line.entry.get("version"))


_TOLD = ("slot", "version", "incarnation", "digest", "transition", "seq", "rollout_id", "publish_id")
