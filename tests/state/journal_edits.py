"""What a forger would do to the journals of a run, and what the audit then finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from state.audit import audit
from state.journal import read_journal

Entries = list[dict[str, Any]]


def entries(run_dir: Path, name: str) -> Entries:
    return list(read_journal(run_dir / "journal" / f"{name}.jsonl"))


def write(run_dir: Path, name: str, lines: Entries, renumber: bool = True) -> None:
    """With `renumber` the numbers have no gaps, as a careful forger would have it."""
    transition = 0
    for seq, entry in enumerate(lines, 1):
        if not renumber:
            break
        entry["seq"] = seq
        if entry["kind"] == "created":
            transition = 0
        if entry["kind"] == "transition":
            transition += 1
            entry["transition"] = transition
    path = run_dir / "journal" / f"{name}.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def edit(run_dir: Path, name: str, change: Callable[[dict[str, Any]], object], **where: Any) -> None:
    """Change the entry that has these fields (the first such)."""
    lines = entries(run_dir, name)
    change(find(lines, **where))
    write(run_dir, name, lines, renumber=False)


def find(lines: Entries, **where: Any) -> dict[str, Any]:
    return next(e for e in lines if all(e.get(k) == v for k, v in where.items()))


def findings(run_dir: Path) -> list[str]:
    return [str(finding) for finding in audit(run_dir).findings]


def found(run_dir: Path, what: str) -> None:
    said = findings(run_dir)
    assert any(what in line for line in said), said


def update(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda entry: entry.update(fields)


def drop(run_dir: Path, name: str, *wheres: dict[str, Any]) -> None:
    lines = entries(run_dir, name)
    for where in wheres:
        lines.remove(find(lines, **where))
    write(run_dir, name, lines)
