"""Replays the journal of one training worker: every transition must be allowed, and about the recorded weights."""

from __future__ import annotations

from collections.abc import Callable

from state import lifecycle
from state.findings import Entry, JournalFile, Notes
from state.rank_history import Key, Outlet, RankHistory, RankLife, Weights, key_of
from state.slots import Provenance, Slot
from state.watch import Watch

_OUTLETS = ("publish", "save")
# Triggers whose entry must be about weights that are recorded already.
_ABOUT_RECORDED = (*_OUTLETS, "ready", "step", "unchanged", "done", "sleep", "switched")


def replay_rank(file: JournalFile, notes: Notes) -> RankHistory:
    """The history of the rank that wrote `file`."""
    first = next((e for e in file.entries if e.get("kind") == "created"), {})
    history = RankHistory(file.name, str(first.get("role", file.source)), int(first.get("rank", -1)))
    replay = _Replay(history, notes)
    for entry in file.entries:
        try:
            replay.take(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            notes.wrong(file.name, entry["seq"], "I12", f"not an entry of a worker: {type(error).__name__} {error}")
    if file.torn and replay.life is not None:
        replay.life.torn = True
    return history


class _Replay:
    def __init__(self, history: RankHistory, notes: Notes) -> None:
        self._history, self._notes = history, notes
        self.life: RankLife | None = None
        self._seq = 0
        self._takers: dict[str, Callable[[RankLife, Entry], None]] = {
            "transition": self._transition,
            "snapshot": self._snapshot,
            "attested": self._attested,
            "kept": self._kept,
            "refusal": self._refusal,
            "written": self._written,
            "write_failed": self._write_failed,
        }

    def take(self, entry: Entry) -> None:
        self._seq = entry["seq"]
        match entry["kind"]:
            case "created":
                self._created(entry)
            case "recovered":
                self._notes.event(self._history.journal, self._seq, "a torn line before this entry was cut off")
                if self.life is not None:
                    self.life.torn = True
            case kind if kind in self._takers:
                life = self._of(entry)
                if life is not None:
                    self._takers[kind](life, entry)
                    for invariant, what in life.watch.see(entry):
                        self._wrong(invariant, f"{self._history.name}: {what}")

    def _wrong(self, invariant: str, what: str) -> None:
        self._notes.wrong(self._history.journal, self._seq, invariant, what)

    def _created(self, entry: Entry) -> None:
        incarnation = int(entry["incarnation"])
        if self._history.lives and incarnation <= max(self._history.lives):
            self._wrong("I7", f"incarnation {incarnation} begins after incarnation {max(self._history.lives)}")
        tiers = {str(slot): str(tier) for slot, tier in entry["slots"].items()}
        primary, kept = Slot(entry["primary"]), frozenset(Slot(slot) for slot in entry["kept"])
        watch = Watch(primary, tiers, kept)
        self.life = RankLife(incarnation, int(entry["world_size"]), primary, tiers, entry, watch)
        self._history.lives[incarnation] = self.life

    def _of(self, entry: Entry) -> RankLife | None:
        """The life that an entry belongs to, which must be the one under way."""
        life = self.life
        own = (self._history.role, self._history.rank)
        if life is None or entry["incarnation"] != life.incarnation or (entry["role"], entry["rank"]) != own:
            whose = f"{entry['role']}/{entry['rank']} in incarnation {entry['incarnation']}"
            self._wrong("I12", f"this entry is of {whose}, which this journal is not in")
            return None
        return life

    def _refusal(self, life: RankLife, entry: Entry) -> None:
        self._notes.event(self._history.journal, self._seq, f"{self._history.name} refused to {entry['what']}")

    def _attested(self, life: RankLife, entry: Entry) -> None:
        if (entry["transition"], entry["state"]) != (life.transition, life.state):
            sworn = f"state {entry['state']} at transition {entry['transition']}"
            self._wrong("I2", f"it attested to {sworn}, and was in {life.state} at {life.transition}")
        if entry["slot"] is not None:
            self._must_be_recorded(life, key_of(Slot(entry["slot"]), entry["version"]), entry, "an attestation")

    def _snapshot(self, life: RankLife, entry: Entry) -> None:
        slot = Slot(entry["slot"])
        if life.state != lifecycle.resident(life.primary):
            self._wrong("I3", f"a snapshot was taken in state {life.state}")
        self._must_be_recorded(life, (life.primary, None), entry, "a snapshot")
        snapshot = str(Provenance.snapshot(entry["version"]))
        life.records[key_of(slot, entry["version"])] = Weights(entry["version"], entry["digest"], snapshot)

    def _kept(self, life: RankLife, entry: Entry) -> None:
        outlet = life.outlets.get(entry["publish_id"])
        if life.state != "saving" or outlet is None or outlet.ended:
            self._wrong("I2", f"{entry['slot']} was kept by {entry['publish_id']}, a save that was not under way")
        else:
            outlet.kept[entry["slot"], entry["version"]] = entry["digest"]
        self._must_be_recorded(life, key_of(Slot(entry["slot"]), entry["version"]), entry, "what was kept")

    def _written(self, life: RankLife, entry: Entry) -> None:
        outlet = life.outlets.get(entry["publish_id"])
        if outlet is None or outlet.purpose != "save" or not outlet.ended:
            self._wrong("I2", f"a copy was written of {entry['publish_id']}, which had let no copy out")
        elif outlet.written:
            self._wrong("I2", f"the copy of {entry['publish_id']} was written twice")
        else:
            outlet.written = True

    def _write_failed(self, life: RankLife, entry: Entry) -> None:
        what = f"{self._history.name} could not write {entry['publish_id']}: {entry['reason']}"
        self._notes.event(self._history.journal, self._seq, what)

    def _transition(self, life: RankLife, entry: Entry) -> None:
        trigger, before, after, slot = entry["trigger"], entry["before"], entry["after"], Slot(entry["slot"])
        if entry["transition"] != life.transition + 1:
            self._wrong("I12", f"transition {entry['transition']} follows transition {life.transition}")
        if before != life.state:
            self._wrong("I12", f"{trigger} starts in {before}, but the last transition ended in {life.state}")
        allowed = lifecycle.next_state(before, trigger, slot, life.primary)
        if allowed != after:
            instead = "may not happen there" if allowed is None else f"leads to {allowed}"
            self._wrong(_INVARIANT.get(trigger, "I3"), f"{trigger} {slot} from {before} to {after}: it {instead}")
        self._check(life, entry, trigger, slot)
        life.transition, life.state = entry["transition"], after
        life.moments.append(entry)
        life.numbered[life.transition] = entry

    def _check(self, life: RankLife, entry: Entry, trigger: str, slot: Slot) -> None:
        key = key_of(slot, entry.get("version"))
        if trigger in _ABOUT_RECORDED:
            self._must_be_recorded(life, key, entry, trigger)
        if trigger in ("step", *_OUTLETS, "sleep", "commit", "ready") and slot is not life.primary:
            self._wrong("I3", f"{trigger} is about {slot}, not about the primary {life.primary}")
        if trigger in ("step", *_OUTLETS) and not life.ready:
            self._wrong("I1", f"{trigger} before ready had verified {life.primary}")
        match trigger:
            case "load":
                life.loading_from, life.moving_to = str(entry.get("provenance", "")), slot
                life.ready = life.ready and slot is not life.primary
            case "switch" | "wake" | "restore":
                life.moving_to = slot
            case "loaded" | "switched" if slot is not life.moving_to:
                self._wrong("I3", f"{slot} came in where {life.moving_to} was on its way")
        match trigger:
            case "loaded":
                self._must_grow(life, key, entry)
                life.records[key] = Weights(entry["version"], entry["digest"], life.loading_from)
            case "ready":
                life.ready = True
            case "step":
                life.rollout_id = entry["rollout_id"]
            case "commit":
                self._commit(life, key, entry)
            case "publish" | "save":
                self._outlet(life, entry, trigger)
            case "done":
                self._done(life, entry)
            case "fail":
                self._notes.event(
                    self._history.journal, self._seq, f"{self._history.name} was poisoned {entry.get('detail', '')}"
                )
                if life.outlets and life.state in ("publishing", "saving"):
                    list(life.outlets.values())[-1].ended = True

    def _must_be_recorded(self, life: RankLife, key: Key, entry: Entry, what: str) -> None:
        known = life.records.get(key)
        said = (entry["version"], entry["digest"])
        if known is None:
            self._wrong("I2", f"{what} is about {key[0]}@{said[0]}, which was never filled")
        elif (known.version, known.digest) != said:
            recorded = f"{known.version} with digest {known.digest}"
            self._wrong("I2", f"{what} is about {key[0]}@{said[0]} with digest {said[1]}; recorded is {recorded}")

    def _must_grow(self, life: RankLife, key: Key, entry: Entry) -> None:
        known = life.records.get(key)
        if key[0] is life.primary and known is not None and entry["version"] < known.version:
            self._wrong("I7", f"{key[0]} went back from version {known.version} to {entry['version']}")

    def _commit(self, life: RankLife, key: Key, entry: Entry) -> None:
        rollout_id, version, known = entry["rollout_id"], entry["version"], life.records.get(key)
        if rollout_id != life.rollout_id:
            self._wrong("I4", f"commit of rollout {rollout_id} ends the step of rollout {life.rollout_id}")
        if version != rollout_id + 1:
            self._wrong("I7", f"rollout {rollout_id} was committed as version {version}, not {rollout_id + 1}")
        if known is not None and version <= known.version:
            self._wrong("I7", f"version {version} was committed over version {known.version}")
        life.commits[rollout_id] = (self._seq, version)
        life.records[key] = Weights(version, entry["digest"], str(Provenance.step(rollout_id)))

    def _outlet(self, life: RankLife, entry: Entry, trigger: str) -> None:
        publish_id = entry["publish_id"]
        if publish_id in life.outlets:
            self._wrong("I2", f"quorum {publish_id} was used twice on this rank")
        if entry["before"] != lifecycle.resident(life.primary):
            self._wrong("I2", f"{trigger} {publish_id} let {entry['before']} out, not the resident {life.primary}")
        life.outlets[publish_id] = Outlet(trigger, self._seq, entry["transition"], entry["version"], entry["digest"])

    def _done(self, life: RankLife, entry: Entry) -> None:
        outlet = life.outlets.get(entry["publish_id"])
        if outlet is None or outlet.ended:
            self._wrong("I2", f"done of {entry['publish_id']}, which was not under way")
        else:
            outlet.ended = True


_INVARIANT = {
    "publish": "I2",
    "save": "I2",
    "done": "I2",
    "step": "I4",
    "commit": "I4",
    "unchanged": "I4",
    "restore": "I5",
    "fail": "I5",
    "ready": "I1",
}
