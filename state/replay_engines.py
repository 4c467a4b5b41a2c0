"""Replays the journal of the fleet: what each engine went through, and which weights it served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from state.engine_life import EnginePhase, next_phase
from state.findings import Entry, JournalFile, Notes
from state.slots import WeightId

SHUT_DOWN = "shut down"
"""Why every engine dies at the end of a run: no event."""


@dataclass(slots=True)
class EngineHistory:
    """One engine by its name, over all processes that had it. `lives` holds the entries of each process, in order,
    `proofs` by publish the digest of what it was found to hold."""

    journal: str
    engine: str
    torn: bool
    lives: list[list[Entry]] = field(default_factory=list)
    newest: WeightId | None = None
    proofs: dict[str, str] = field(default_factory=dict)

    def outcome(self, publish_id: str) -> tuple[Entry | None, Entry | None]:
        """The entry by which this engine committed a publish (or None), and the one by which it left service, or gave
        the update up."""
        for life in self.lives:
            began = [i for i, e in enumerate(life) if e["trigger"] == "begin_update" and e["publish_id"] == publish_id]
            for i in began:
                after = life[i + 1 : i + 3]
                commit = after[0] if after and after[0]["trigger"] == "commit" else None
                left = after[1:] if commit is not None else after[:1]
                return commit, left[0] if left else None
        return None, None


def replay_engines(file: JournalFile, notes: Notes) -> dict[str, EngineHistory]:
    """Histories by engine name."""
    histories: dict[str, EngineHistory] = {}
    for entry in file.entries:
        if entry.get("kind") == "recovered":
            notes.event(file.name, entry["seq"], "a torn line before this entry was cut off")
            for history in histories.values():
                history.torn = True
        if entry.get("kind") in ("engine", "proof"):
            try:
                history = histories.setdefault(entry["engine"], EngineHistory(file.name, entry["engine"], file.torn))
                if entry["kind"] == "proof":
                    history.proofs[entry["publish_id"]] = entry["digest"]
                else:
                    _take(history, entry, notes)
            except (KeyError, TypeError, ValueError) as error:
                notes.wrong(
                    file.name, entry["seq"], "I12", f"not an entry of an engine: {type(error).__name__} {error}"
                )
    return histories


def _take(history: EngineHistory, entry: Entry, notes: Notes) -> None:
    def wrong(invariant: str, what: str) -> None:
        notes.wrong(history.journal, entry["seq"], invariant, f"{history.engine}: {what}")

    trigger, before, after = entry["trigger"], entry["before"], entry["state"]
    begins = entry["transition"] == 1 and before == EnginePhase.STARTING
    if begins or not history.lives:
        history.lives.append([])
    life = history.lives[-1]
    transition, state = (life[-1]["transition"], life[-1]["state"]) if life else (0, str(EnginePhase.STARTING))
    if entry["transition"] != transition + 1:
        wrong("I12", f"transition {entry['transition']} follows transition {transition}")
    if before != state:
        wrong("I12", f"{trigger} starts in {before}, but the last transition ended in {state}")
    if (allowed := next_phase(before, trigger)) != after:
        instead = "may not happen there" if allowed is None else f"leads to {allowed}"
        wrong("I8", f"{trigger} from {before} to {after}: it {instead}")
    weights = None if entry["version"] is None else WeightId(entry["incarnation"], entry["version"])
    if (weights is not None) != (after == EnginePhase.SERVING):
        wrong("I7", f"it is {after} with weights {weights}")
    if trigger == "commit":
        begun = life[-1]["publish_id"] if life else None
        if entry["publish_id"] != begun:
            wrong("I7", f"committed publish {entry['publish_id']} while {begun} was under way")
        if weights is not None and history.newest is not None and weights < history.newest:
            wrong("I7", f"went back from weights {history.newest} to {weights}")
        history.newest = weights or history.newest
    if trigger in ("abort", "withdraw", "die") and entry["reason"] != SHUT_DOWN:
        notes.event(history.journal, entry["seq"], f"{history.engine}: {trigger}, {entry['reason']}")
    life.append(entry)


def row(history: EngineHistory, published: WeightId | None) -> dict[str, Any]:
    """The last state of an engine, as the fleet shows a live one."""
    last = history.lives[-1][-1]
    version, incarnation = last["version"], last["incarnation"]
    same = published is not None and version is not None and incarnation == published.incarnation
    return {
        "engine": history.engine,
        "state": last["state"],
        "version": version,
        "incarnation": incarnation,
        "behind_by": published.version - version if same and published is not None else None,
        "publish_id": last["publish_id"],
        "reason": last["reason"],
    }
