"""Replays the journals of a run and checks the invariants, from the files alone.

Every rank's transitions must be allowed and about recorded weights; the driver's publishes, saves and training must be
those of all ranks, and no rank or engine may have done anything that the driver does not know of. A run that was
killed is no violation: what it left unfinished is told as an event. Refusals and poisonings are events too, but for
those that show bytes other than recorded: somebody changed weights, even where nothing came of it.

No torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from state import rank_history, replay_engines, replay_rank
from state.audit_report import AuditReport
from state.cross_check import cross_check
from state.findings import JournalFile, Notes, read_file
from state.rank_history import RankHistory
from state.replay_driver import DriverHistory, replay_driver
from state.replay_engines import EngineHistory
from state.resume_check import resume_check

DRIVER, FLEET = "driver", "fleet"


def journals(run_dir: Path) -> list[Path]:
    """The journals of a run, by name; none: it is not the directory of a run."""
    return sorted(path for path in (run_dir / "journal").glob("*.jsonl") if path.is_file())


def audit(run_dir: Path) -> AuditReport:
    """Check the journals in `run_dir/journal`."""
    notes = Notes()
    driver, ranks, engines = _replay(run_dir, notes)
    cross_check(driver, ranks, engines, notes)
    resume_check(driver, ranks, notes)
    return AuditReport(run_dir, tuple(notes.findings), tuple(notes.events), driver, ranks, engines)


def latest_views(run_dir: Path) -> dict[str, Any]:
    """Which weights were live where, by the last entry of each journal; in the form that a live run answers with,
    and how it `ended` (`done`, `failed`; None where nobody could say)."""
    driver, ranks, engines = _replay(run_dir, Notes())
    workers = [rank_history.row(history) for history in ranks if history.lives]
    published = driver.published()
    last = list(driver.starts.values())[-1:]
    return {
        "run": workers[0]["worker"].split("/")[0] if workers else run_dir.name,
        "source": "journal",
        "ended": last[0].ended if last else None,
        "workers": workers,
        "engines": [replay_engines.row(history, published) for history in engines.values() if history.lives],
    }


def _replay(run_dir: Path, notes: Notes) -> tuple[DriverHistory, tuple[RankHistory, ...], dict[str, EngineHistory]]:
    files = [read_file(path, notes) for path in journals(run_dir)]
    by_source: dict[str, JournalFile] = {}
    for file in files:
        if file.source and by_source.setdefault(file.source, file) is not file:
            what = f"{file.source} has another journal, {by_source[file.source].name}; this one is not read"
            notes.wrong(file.name, None, "I12", what)
    if DRIVER not in by_source:
        own = next((file for file in files if file.name == f"{DRIVER}.jsonl" and not file.source), None)
        if own is None:
            notes.wrong("journal", None, "I12", "there is no journal of the driver")
        else:
            notes.event(own.name, None, "has no entry: the run ended before its first")
    driver = replay_driver(by_source.get(DRIVER, JournalFile(f"{DRIVER}.jsonl", (), False)), notes)
    engines = replay_engines.replay_engines(by_source[FLEET], notes) if FLEET in by_source else {}
    workers = [file for source, file in by_source.items() if source not in (DRIVER, FLEET)]
    ranks = sorted((replay_rank.replay_rank(file, notes) for file in workers), key=lambda h: (h.role, h.rank))
    return driver, tuple(ranks), engines
