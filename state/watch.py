"""What the entries of one rank show of its bytes: that they were hashed where they came in, and were those recorded.

`replay_rank` checks that every transition may happen and is about recorded weights. A label may be right and the bytes
wrong all the same, so a worker also journals what it hashed, whether the optimizer had written, and what was lent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from state import lifecycle
from state.findings import Entry
from state.slots import Slot, Tier

Fault = tuple[str, str]
"""The invariant, and what is wrong."""


@dataclass(slots=True)
class Watch:
    """Follows one incarnation of one rank. `tiers`: where each slot of it rests; `kept`: those a checkpoint must hold.

    `lent` is the slot that an open borrow has brought in, `loaded` the version of what init filled each slot with,
    `attested` the digest sworn to by transition. By rollout, `before` is the version of the primary that was trained,
    and `used` those of old_actor that were computed with to train it.
    """

    primary: Slot
    tiers: Mapping[str, str]
    kept: frozenset[Slot] = frozenset()
    lent: Slot | None = None
    loaded: set[tuple[Slot, int]] = field(default_factory=set)
    attested: dict[int, str] = field(default_factory=dict)
    used: dict[int, frozenset[int]] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    _from: str = "cold"
    _digest: str | None = None
    _poisoned_while: str | None = None
    _borrowed: set[int] = field(default_factory=set)

    def see(self, entry: Entry) -> Iterator[Fault]:
        """What is wrong with the next entry."""
        match entry["kind"]:
            case "transition":
                yield from self._transition(entry, Slot(entry["slot"]))
            case "snapshot":
                yield from self._slot(Slot(entry["slot"]))
                yield from self._hashed(entry, "I9", f"a snapshot of {self.primary} was taken")
            case "attested":
                yield from self._attested(entry)
            case "refusal" if self.lent is not None and not entry["lent"]:
                yield "I3", f"it is asked to {entry['what']}, and {self.lent} is live although nobody borrows it"

    def _transition(self, entry: Entry, slot: Slot) -> Iterator[Fault]:
        trigger, before = entry["trigger"], str(entry["before"])
        yield from self._slot(slot)
        if self.lent is not None and trigger not in lifecycle.WHILE_LENT:
            yield "I3", f"{trigger} {slot} began while {self.lent} was lent"
        match trigger:
            case "switch" | "wake":
                self._from = before
            case "restore":
                self._from = before
                if self._poisoned_while not in lifecycle.RESTORABLE:
                    yield (
                        "I5",
                        f"it was restored after an error while {self._poisoned_while}, which only a new gang ends",
                    )
            case "loaded":
                self.loaded.add((slot, entry["version"]))
                if slot is self.primary:
                    self._digest = entry["digest"]
            case "ready":
                yield from self._hashed(entry, "I1", f"ready {slot}")
            case "step":
                self.before[entry["rollout_id"]] = entry["version"]
            case "switched":
                yield from self._switched(entry, slot)
            case "commit":
                if not entry["wrote"] and entry["digest"] != self._digest:
                    yield "I4", f"{slot} changed in rollout {entry['rollout_id']}, in which the optimizer did not write"
                self._digest = entry["digest"]
                self.used[entry["rollout_id"]], self._borrowed = frozenset(self._borrowed), set()
            case "unchanged" if entry["wrote"]:
                yield "I5", f"{slot} is said to be unchanged by a step in which the optimizer had written"
            case "fail":
                self._poisoned_while, self.lent = before, None
                if "live" in entry:
                    found = f"{entry['live']}, recorded was {entry['recorded']}"
                    invariant = "I1" if before == lifecycle.resident(self.primary) else _INVARIANT.get(before, "I3")
                    yield invariant, f"live bytes were {found}: {entry.get('detail', '')}"

    def _switched(self, entry: Entry, slot: Slot) -> Iterator[Fault]:
        # Where a slot rests on the device, the primary's bytes stay in place under it and need no second look.
        came_from = self._from.removeprefix("resident" + lifecycle.SEPARATOR)
        if slot is not self.primary or self.tiers.get(came_from) != Tier.DEVICE:
            yield from self._hashed(entry, "I3", f"{slot}@{entry['version']} came in")
        self.lent = None if slot is self.primary else slot
        if slot is Slot.OLD_ACTOR:
            self._borrowed.add(entry["version"])

    def _attested(self, entry: Entry) -> Iterator[Fault]:
        if entry["live"] is None:
            return
        self.attested[entry["transition"]] = entry["live"]
        if entry["state"] != lifecycle.resident(self.primary):
            yield "I3", f"live bytes were hashed in state {entry['state']}"
        named = f" ({', '.join(entry['changed'])})" if entry["changed"] else ""
        yield from self._hashed(entry, "I2", f"it attested to {entry['slot']}@{entry['version']}{named}")
        for kept in entry["kept"]:
            yield from self._hashed(kept, "I10", f"it attested to {kept['slot']}@{kept['version']}")

    def _hashed(self, entry: Entry, invariant: str, what: str) -> Iterator[Fault]:
        live = entry.get("live")
        if live is None:
            yield invariant, f"{what}, and nobody had hashed it"
        elif live != entry["digest"]:
            yield invariant, f"{what} with live bytes {live}; recorded is {entry['digest']}"

    def _slot(self, slot: Slot) -> Iterator[Fault]:
        if slot not in self.tiers:
            yield "I3", f"this worker has no slot {slot}; it has {', '.join(self.tiers)}"


_INVARIANT = {"stepping": "I4", "publishing": "I2", "saving": "I2"}
