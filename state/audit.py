"""Replays the journals of a run and checks the invariants, from the files alone.

Every rank's transitions must be allowed and about recorded weights; the driver's publishes, saves and training must be
those of all ranks, and no rank or engine may have done anything that the driver does not know of. A run that was
killed is no violation: what it left unfinished is told as an event. Refusals and poisonings are events too, but for
those that show bytes other than recorded: somebody changed weights, even where nothing came of it.

No torch is imported.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state import rank_history, replay_engines, replay_rank
from state.cross_check import cross_check
from state.findings import Entry, Event, Finding, JournalFile, Notes, read_file
from state.rank_history import RankHistory
from state.replay_driver import DriverHistory, Start, replay_driver, weights
from state.replay_engines import EngineHistory
from state.resume_check import resume_check

DRIVER, FLEET = "driver", "fleet"
_MOMENT = ("seq", "incarnation", "transition", "at", "trigger", "before", "after", "slot", "version", "digest")
_PASSING = ("loading", "switching")


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

    def __str__(self) -> str:
        transitions = sum(len(life.moments) for h in self.ranks for life in h.lives.values())
        publishes = sum(len(start.publishes) for start in self.driver.starts.values())
        saves = sum(len(start.saves) for start in self.driver.starts.values())
        lines = [
            f"{self.run_dir}: {len(self.ranks)} ranks, {len(self.engines)} engines, {len(self.driver.starts)} starts, "
            f"{transitions} transitions, {publishes} publishes, {saves} saves",
            "every invariant that journals can show holds" if self.ok else f"{len(self.findings)} violations",
        ]
        for title, what in (("violations", self.findings), ("events", self.events)):
            if what:
                lines += ["", title, *(f"  {one}" for one in what)]
        lines += ["", "driver"]
        lines += [f"  {line}" for start in self.driver.starts.values() for line in _story(start)]
        lines += ["", "ranks"]
        for history in self.ranks:
            for life in history.lives.values():
                lines += _lane(f"{history.name} [{life.incarnation}]", [_where(e) for e in life.moments])
        lines += ["", "engines"]
        for name, engine in self.engines.items():
            for steps in engine.lives:
                lines += _lane(name, [_engine_where(e) for e in steps])
        return "\n".join(lines)


def audit(run_dir: Path) -> AuditReport:
    """Check the journals in `run_dir/journal`."""
    notes = Notes()
    driver, ranks, engines = _replay(run_dir, notes)
    cross_check(driver, ranks, engines, notes)
    resume_check(driver, ranks, notes)
    return AuditReport(run_dir, tuple(notes.findings), tuple(notes.events), driver, ranks, engines)


def latest_views(run_dir: Path) -> dict[str, Any]:
    """Which weights were live where, by the last entry of each journal; in the form that a live run answers with."""
    driver, ranks, engines = _replay(run_dir, Notes())
    workers = [rank_history.row(history) for history in ranks if history.lives]
    published = driver.published()
    return {
        "run": workers[0]["worker"].split("/")[0] if workers else run_dir.name,
        "source": "journal",
        "workers": workers,
        "engines": [replay_engines.row(history, published) for history in engines.values()],
    }


def _replay(run_dir: Path, notes: Notes) -> tuple[DriverHistory, tuple[RankHistory, ...], dict[str, EngineHistory]]:
    files = [read_file(path, notes) for path in sorted((run_dir / "journal").glob("*.jsonl"))]
    by_source: dict[str, JournalFile] = {}
    for file in files:
        if file.entries and by_source.setdefault(file.source, file) is not file:
            what = f"{file.source} has another journal, {by_source[file.source].name}; this one is not read"
            notes.wrong(file.name, None, "I12", what)
    if DRIVER not in by_source:
        notes.wrong("journal", None, "I12", "there is no journal of the driver")
    driver = replay_driver(by_source.get(DRIVER, JournalFile(f"{DRIVER}.jsonl", (), False)), notes)
    engines = replay_engines.replay_engines(by_source[FLEET], notes) if FLEET in by_source else {}
    workers = [file for source, file in by_source.items() if source not in (DRIVER, FLEET)]
    ranks = sorted((replay_rank.replay_rank(file, notes) for file in workers), key=lambda h: (h.role, h.rank))
    return driver, tuple(ranks), engines


def _moment(entry: Entry) -> dict[str, Any]:
    more = ("rollout_id", "publish_id", "provenance", "detail")
    return {name: entry.get(name) for name in _MOMENT} | {name: entry[name] for name in more if name in entry}


def _story(start: Start) -> list[str]:
    """What the driver did in one incarnation, in its order."""
    size = "did not start" if start.world_size is None else f"of {start.world_size} started"
    happened = [*start.publishes.values(), *start.saves.values(), *start.trained.values()]
    lines = [f"incarnation {start.incarnation}: gang {size}"]
    for entry in sorted(happened, key=lambda e: int(e["seq"])):
        match entry["kind"]:
            case "trained":
                lines.append(f"trained rollout {entry['rollout_id']}: version {entry['version']}")
            case "save":
                how = " in the background" if entry["publish_id"] in start.begun else ""
                what = f"actor@{weights(entry)} {entry['digest']}"
                lines.append(f"saved {what} as iteration {entry['iteration']}{how}")
            case _ if "digest" in entry:
                to = ", ".join(f"{engine} {verdict}" for engine, verdict in entry["engines"].items())
                what = f"{entry['slot']}@{weights(entry)} {entry['digest']}"
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
