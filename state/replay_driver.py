"""Replays the driver's journal: starts of the gang, and what the driver believes was trained, published and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from state.entries import role_of
from state.findings import Entry, JournalFile, Notes
from state.slots import Slot, WeightId

PUBLISHED = ("committed", "aborted")
_OWN = ("seq", "kind", "at")
"""Fields in which any two entries differ."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The plan that an incarnation started by. `root` is the directory of checkpoints, None for random weights."""

    source: str
    root: str | None
    iteration: int | None
    begins: int
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one role in one incarnation."""

    world_size: int
    resume: Resume


@dataclass(slots=True)
class Start:
    """One incarnation as the driver saw it. `ended` is `done`, `failed`, or None: the driver was killed.

    `gangs` by role. `asked_start` is the user's `loop.start_rollout_id`. `held` is by slot what the gangs swore to
    after a resume that nothing was found wrong with; None where it was, or where nobody looked. `begun`: saves that
    went on in the background, by id; those among `saves` were completed.
    """

    incarnation: int
    gangs: dict[str, Gang] = field(default_factory=dict)
    ended: str | None = None
    asked_start: int | None = None
    held: Mapping[str, str] | None = None
    publishes: dict[str, Entry] = field(default_factory=dict)
    saves: dict[str, Entry] = field(default_factory=dict)
    begun: dict[str, Entry] = field(default_factory=dict)
    trained: dict[int, Entry] = field(default_factory=dict)

    @property
    def cut_short(self) -> bool:
        return self.ended != "done"

    @property
    def unfinished(self) -> list[str]:
        """Ids of saves that were begun in the background, and never completed."""
        return [publish_id for publish_id in self.begun if publish_id not in self.saves]


@dataclass(slots=True)
class DriverHistory:
    journal: str
    torn: bool
    starts: dict[int, Start] = field(default_factory=dict)

    def published(self) -> WeightId | None:
        """The weights of the last committed publish."""
        committed = [p for s in self.starts.values() for p in s.publishes.values() if p["outcome"] == "committed"]
        return weights(committed[-1]) if committed else None


def weights(entry: Entry) -> WeightId:
    return WeightId(entry["incarnation"], entry["version"])


def replay_driver(file: JournalFile, notes: Notes) -> DriverHistory:
    history = DriverHistory(file.name, file.torn)
    replay = _Replay(history, notes)
    for entry in file.entries:
        try:
            replay.take(entry)
        except (KeyError, TypeError, ValueError) as error:
            notes.wrong(file.name, entry["seq"], "I12", f"not an entry of the driver: {type(error).__name__} {error}")
    for start in history.starts.values():
        if start.ended is None:
            notes.event(file.name, None, f"incarnation {start.incarnation} was cut short: the driver was killed")
        for publish_id in start.unfinished:
            what = f"{publish_id} was begun in the background, and never completed"
            if start.cut_short:
                notes.event(file.name, start.begun[publish_id]["seq"], f"{what}: the run was cut short")
            else:
                notes.wrong(file.name, start.begun[publish_id]["seq"], "I11", what)
    return history


def _resume(plan: Mapping[str, Any]) -> Resume:
    return Resume(
        plan["source"], plan["path"], plan["iteration"], plan["start_rollout_id"], bool(plan["load_optimizer"])
    )


class _Replay:
    def __init__(self, history: DriverHistory, notes: Notes) -> None:
        self._history, self._notes = history, notes
        self._start: Start | None = None
        self._ids: set[str] = set()
        self._digests: dict[tuple[str, WeightId], str] = {}
        self._newest: WeightId | None = None
        self._seq = 0

    def take(self, entry: Entry) -> None:
        self._seq = entry["seq"]
        match entry["kind"]:
            case "driver_started":
                self._begin(entry["incarnation"]).asked_start = entry["start_rollout_id"]
            case "gang_rebuild":
                former = self._under_way()
                if former.ended is None:
                    self._wrong("I12", f"a gang was rebuilt, and that of {former.incarnation} had not failed")
                self._begin(entry["incarnation"]).asked_start = former.asked_start
            case "gang_failed":
                self._gang_failed(entry)
            case "gang_started":
                if self._start is None or self._start.incarnation != entry["incarnation"]:
                    self._begin(entry["incarnation"])
                self._under_way().gangs[entry["role"]] = Gang(entry["world_size"], _resume(entry["resume"]))
            case "continuity":
                if entry["same_dtype"] and not entry["jumps"]:
                    self._under_way().held = entry["held"]
                for jump in entry["jumps"]:
                    self._notes.event(self._history.journal, self._seq, f"resumed otherwise than saved: {jump}")
            case "publish":
                self._publish(entry)
            case "save_begun":
                self._save_begun(entry)
            case "save":
                self._save(entry)
            case "trained":
                self._trained(entry)
            case "run_ended":
                self._end(entry["outcome"])
                if entry["outcome"] != "done":
                    reason = str(entry.get("reason", "")).splitlines() or ["no reason given"]
                    words = reason[0] if len(reason) == 1 else f"{reason[0]} {reason[-1]}"
                    self._notes.event(self._history.journal, self._seq, f"the run ended early: {words}")
            case "recovered":
                self._notes.event(self._history.journal, self._seq, "a torn line before this entry was cut off")

    def _wrong(self, invariant: str, what: str) -> None:
        self._notes.wrong(self._history.journal, self._seq, invariant, what)

    def _begin(self, incarnation: int) -> Start:
        if self._history.starts and incarnation <= max(self._history.starts):
            self._wrong("I7", f"incarnation {incarnation} begins after incarnation {max(self._history.starts)}")
        self._start = self._history.starts[incarnation] = Start(incarnation)
        return self._start

    def _end(self, outcome: str) -> None:
        start = self._under_way()
        if start.ended is not None and outcome == "done":
            self._wrong("I7", f"the run is done, although the gang of incarnation {start.incarnation} failed")
        start.ended = outcome

    def _gang_failed(self, entry: Entry) -> None:
        start = self._under_way()
        start.ended = "failed"
        if entry["incarnation"] != start.incarnation:
            self._wrong("I7", f"the gang of incarnation {entry['incarnation']} failed during {start.incarnation}")
        first = (str(entry["reason"]).splitlines() or ["no reason given"])[0]
        became = "was rebuilt" if entry["rebuild"] else "was not rebuilt"
        what = f"the gang of incarnation {start.incarnation} failed and {became} ({entry['why']}): {first}"
        self._notes.event(self._history.journal, self._seq, what)

    def _under_way(self) -> Start:
        if self._start is None:
            raise ValueError("no incarnation had begun")
        return self._start

    def _publish(self, entry: Entry) -> None:
        start, publish_id, outcome = self._under_way(), entry["publish_id"], entry["outcome"]
        self._must_be_new(publish_id)
        start.publishes[publish_id] = entry
        if outcome != "committed":
            self._notes.event(
                self._history.journal, self._seq, f"{publish_id} was {outcome}: {entry.get('reason', '')}"
            )
        if "digest" not in entry:  # refused before there was a quorum
            return
        self._about_gang(start, entry, len(entry["summaries"]))
        if entry["slot"] != Slot.ACTOR:
            self._wrong("I2", f"{publish_id} published {entry['slot']}")
        if outcome != "committed":
            return
        if self._newest is not None and weights(entry) < self._newest:
            self._wrong("I7", f"{publish_id} published {weights(entry)} after {self._newest}")
        self._newest = weights(entry)

    def _save_begun(self, entry: Entry) -> None:
        start = self._under_way()
        for other in (one for one in start.unfinished if role_of(start.begun[one]) == role_of(entry)):
            self._wrong("I11", f"{entry['publish_id']} was begun while {other} was not complete")
        self._must_be_new(entry["publish_id"])
        start.begun[entry["publish_id"]] = entry
        self._about_gang(start, entry, len(entry["summaries"]))

    def _save(self, entry: Entry) -> None:
        start, publish_id = self._under_way(), entry["publish_id"]
        if publish_id not in start.begun or publish_id in start.saves:
            self._must_be_new(publish_id)
        else:
            begun = start.begun[publish_id].items()
            for name in (name for name, value in begun if name not in _OWN and entry.get(name) != value):
                self._wrong("I11", f"{publish_id} was completed with another {name} than it was begun with")
        start.saves[publish_id] = {"path": entry["path"], "slots": entry["slots"]} | dict(entry)
        self._about_gang(start, entry, len(entry["summaries"]))
        if entry["version"] != entry["iteration"] + 1:
            self._wrong("I11", f"iteration {entry['iteration']} was saved with weights of version {entry['version']}")

    def _trained(self, entry: Entry) -> None:
        start, rollout_id = self._under_way(), entry["rollout_id"]
        if entry["version"] != rollout_id + 1:
            self._wrong("I7", f"rollout {rollout_id} was trained to version {entry['version']}, not {rollout_id + 1}")
        if start.trained and rollout_id <= max(start.trained):
            self._wrong("I7", f"rollout {rollout_id} was trained after rollout {max(start.trained)}")
        start.trained[rollout_id] = {"behaviour": entry["behaviour"]} | dict(entry)

    def _must_be_new(self, publish_id: str) -> None:
        if publish_id in self._ids:
            self._wrong("I2", f"quorum {publish_id} was used twice")
        self._ids.add(publish_id)

    def _about_gang(self, start: Start, entry: Entry, ranks: int) -> None:
        publish_id = entry["publish_id"]
        if entry["incarnation"] != start.incarnation:
            self._wrong("I7", f"{publish_id} is of incarnation {entry['incarnation']} during {start.incarnation}")
        role = role_of(entry)
        gang = start.gangs.get(role)
        if gang is None:
            self._wrong("I1", f"{publish_id} came before the gang had started")
        elif not ranks == len(entry["transitions"]) == gang.world_size:
            self._wrong("I2", f"{publish_id} was agreed by {ranks} ranks of a gang of {gang.world_size}")
        known = self._digests.setdefault((role, weights(entry)), entry["digest"])
        if known != entry["digest"]:
            self._wrong(
                "I2", f"{publish_id} names {weights(entry)} with digest {entry['digest']}; before it was {known}"
            )
