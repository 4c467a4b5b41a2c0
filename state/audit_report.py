"""What an audit found, and how it is told: in short, as a timeline, as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state.entries import role_of
from state.findings import Entry, Event, Finding
from state.rank_history import RankHistory
from state.replay_driver import DriverHistory, Start, weights
from state.replay_engines import EngineHistory
from state.slots import Slot, short_digest

_MOMENT = ("seq", "incarnation", "transition", "at", "trigger", "before", "after", "slot", "version", "digest")
_PASSING = ("loading", "switching")
_ABOUT_DIGESTS = """\
digests: of a rank, of what it holds of a slot, as `slotwise slots` shows it; of a publish or a save, of the whole
tensors that all ranks hold together. Both by their first digits."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`findings` are broken invariants, `events` what else is worth knowing. The histories make the timelines."""

    run_dir: Path
    findings: tuple[Finding, ...]
    events: tuple[Event, ...]
    driver: DriverHistory
    ranks: tuple[RankHistory, ...]
    engines: Mapping[str, EngineHistory]

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run_dir),
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "events": [event.to_json() for event in self.events],
            "driver": [line for start in self.driver.starts.values() for line in _story(start)],
            "ranks": {h.name: [_moment(e) for life in h.lives.values() for e in life.moments] for h in self.ranks},
            "engines": {name: [dict(entry) for life in h.lives for entry in life] for name, h in self.engines.items()},
        }

    def summary(self) -> str:
        """The verdict, what it rests on, and a line for each rank and engine."""
        lines = [
            f"{self.run_dir}: {_count(self.ranks, 'rank')}, {_count(self.engines, 'engine')}, "
            f"{_count(self.driver.starts, 'start')}",
            "every invariant that journals can show holds" if self.ok else _count(self.findings, "violation"),
        ]
        for title, what in (("violations", self.findings), ("events", self.events)):
            if what:
                lines += ["", title, *(f"  {one}" for one in what)]
        lines += ["", "checked", *(f"  {line}" for line in self._checked())]
        lines += ["", "ranks", *(f"  {_rank_line(history)}" for history in self.ranks)]
        lines += ["", "engines", *(f"  {_engine_line(history)}" for history in self.engines.values())]
        return "\n".join([*lines, "", _ABOUT_DIGESTS])

    def timeline(self) -> str:
        """Everything that the driver did, and who held what when."""
        lines = ["driver", *(f"  {line}" for start in self.driver.starts.values() for line in _story(start))]
        lines += ["", "ranks"]
        for history in self.ranks:
            for life in history.lives.values():
                lines += _lane(f"{history.name} [{life.incarnation}]", [_where(e) for e in life.moments])
        lines += ["", "engines"]
        for name, engine in self.engines.items():
            for steps in engine.lives:
                lines += _lane(name, [_engine_where(e) for e in steps])
        return "\n".join(lines)

    def _checked(self) -> Iterator[str]:
        starts = list(self.driver.starts.values())
        lives = [life for history in self.ranks for life in history.lives.values()]
        transitions = sum(len(life.moments) for life in lives)
        yield f"{transitions} transitions of ranks: each allowed, and about weights that are recorded"
        yield f"{sum(len(life.watch.attested) for life in lives)} times a rank swore to the bytes it had just hashed"
        publishes, saves = sum(len(s.publishes) for s in starts), sum(len(s.saves) for s in starts)
        yield f"{publishes} publishes, {saves} saves and exports: agreed on by all ranks, none of which had moved since"
        proofs = sum(len(history.proofs) for history in self.engines.values())
        yield f"{proofs} times an engine hashed what it held: what was published, wherever it served"
        yield f"{sum(len(s.trained) for s in starts)} rollouts trained: committed by every rank, under one version"
        yield f"{sum(bool(s.gangs) for s in starts)} starts: from where their plan says, with what was saved"


def _rank_line(history: RankHistory) -> str:
    lives = list(history.lives.values())
    if not lives:
        return f"{history.name}  nothing"
    life = lives[-1]
    weights = life.held()
    held = life.state if weights is None else f"{life.live()}@{life.incarnation}.{weights.version}"
    digest = "" if weights is None else f" {short_digest(weights.digest)}"
    transitions, commits = sum(len(one.moments) for one in lives), sum(len(one.commits) for one in lives)
    let_out = sum(len(one.outlets) for one in lives)
    did = f"{transitions} transitions, {commits} commits, let bytes out {let_out} times"
    return f"{history.name}  {did}; ends with {held}{digest}"


def _engine_line(history: EngineHistory) -> str:
    entries = [entry for life in history.lives for entry in life]
    served = sum(entry["trigger"] == "commit" for entry in entries)
    serving = [_engine_where(entry) for entry in entries if entry["version"] is not None]
    last = f", last {serving[-1].removeprefix('serving ')}" if serving else ""
    return f"{history.engine}  served {served} publishes{last}; ends {entries[-1]['state'] if entries else 'unknown'}"


def _moment(entry: Entry) -> dict[str, Any]:
    more = ("rollout_id", "publish_id", "provenance", "detail")
    return {name: entry.get(name) for name in _MOMENT} | {name: entry[name] for name in more if name in entry}


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _story(start: Start) -> list[str]:
    """What the driver did in one incarnation, in its order."""
    sizes = {role: gang.world_size for role, gang in start.gangs.items()}
    size = "did not start" if not sizes else f"of {sizes.pop(Slot.ACTOR, 0)} started"
    size += "".join(f", and {role}'s of {ranks}" for role, ranks in sizes.items())
    happened = [*start.publishes.values(), *start.saves.values(), *start.trained.values()]
    lines = [f"incarnation {start.incarnation}: gang {size}"]
    for entry in sorted(happened, key=lambda e: int(e["seq"])):
        match entry["kind"]:
            case "trained":
                lines.append(f"trained rollout {entry['rollout_id']}: version {entry['version']}")
            case "save":
                how = " in the background" if entry["publish_id"] in start.begun else ""
                what = f"{role_of(entry)}@{weights(entry)} {short_digest(entry['digest'])}"
                lines.append(f"saved {what} as iteration {entry['iteration']}{how}")
            case _ if "digest" in entry:
                to = ", ".join(f"{engine} {verdict}" for engine, verdict in entry["engines"].items())
                what = f"{entry['slot']}@{weights(entry)} {short_digest(entry['digest'])}"
                lines.append(f"{entry['publish_id']} {entry['outcome']}: {what} to {to or 'no engine'}")
            case _:
                lines.append(f"{entry['publish_id']} {entry['outcome']}")
    return [*lines, f"ended: {start.ended or 'killed'}"]


def _where(entry: Entry) -> str:
    state = str(entry["after"])
    if state in _PASSING:
        return ""
    if state.startswith("resident."):
        return f"{entry['slot']}@{entry.get('version')}"
    about = entry.get("publish_id", entry.get("rollout_id"))
    return state if about is None else f"{state}({about})"


def _engine_where(entry: Entry) -> str:
    return f"serving {entry['incarnation']}.{entry['version']}" if entry["version"] is not None else str(entry["state"])


def _lane(name: str, places: list[str]) -> list[str]:
    """One lane: where it was, one after the other; staying is told once."""
    shown = [place for place in places if place]
    distinct = [place for i, place in enumerate(shown) if i == 0 or place != shown[i - 1]]
    indent = " " * 4
    text = " > ".join(distinct) or "nothing"
    return [f"  {name}", *textwrap.wrap(text, 116, initial_indent=indent, subsequent_indent=indent)]
