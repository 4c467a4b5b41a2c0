"""What an audit says, and the journal files it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from state.entries import fault
from state.journal import JournalDamaged, read_journal

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant. `seq` is the entry that shows it, None where an entry is missing altogether."""

    journal: str
    seq: int | None
    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}  {self.journal}{'' if self.seq is None else f':{self.seq}'}  {self.what}"

    def to_json(self) -> dict[str, Any]:
        return {"journal": self.journal, "seq": self.seq, "invariant": self.invariant, "what": self.what}


@dataclass(frozen=True, slots=True)
class Event:
    """Worth knowing, and no violation: a refusal, a poisoned worker, the end of an incarnation cut short."""

    journal: str
    seq: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.journal}{'' if self.seq is None else f':{self.seq}'}  {self.what}"

    def to_json(self) -> dict[str, Any]:
        return {"journal": self.journal, "seq": self.seq, "what": self.what}


@dataclass(slots=True)
class Notes:
    """Collects findings and events while journals are replayed."""

    findings: list[Finding] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def wrong(self, journal: str, seq: int | None, invariant: str, what: str) -> None:
        self.findings.append(Finding(journal, seq, invariant, what))

    def event(self, journal: str, seq: int | None, what: str) -> None:
        self.events.append(Event(journal, seq, what))


@dataclass(frozen=True, slots=True)
class JournalFile:
    """The entries of one file, in order. `torn`: the last line was cut off by a kill."""

    name: str
    entries: tuple[Entry, ...]
    torn: bool
    source: str = ""
    """Whose it is, by its first line; empty where no line says so."""


def read_file(path: Path, notes: Notes) -> JournalFile:
    """Read one journal; damage, gaps and doubled numbers are findings, and so is an entry that lacks what its kind
    holds, which is then left out."""
    entries: list[Entry] = []
    seq, source = 0, ""
    try:
        for entry in read_journal(path):
            if entry["seq"] != seq + 1:
                what = f"entry {entry['seq']} follows entry {seq}: entries were lost, doubled or moved"
                notes.wrong(path.name, entry["seq"], "I12", what)
            seq, source = entry["seq"], source or str(entry.get("source", ""))
            if (wrong := fault(entry)) is None:
                entries.append(entry)
            else:
                notes.wrong(path.name, seq, "I12", wrong)
    except JournalDamaged as error:
        notes.wrong(path.name, seq or None, "I12", f"damaged, and not read any further: {error}")
    content = path.read_bytes()
    torn = bool(content) and not content.endswith(b"\n")
    if torn:
        notes.event(path.name, None, "the last line is torn: its writer was killed")
    return JournalFile(path.name, tuple(entries), torn, source)
