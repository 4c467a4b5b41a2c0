"""Records as one JSON object per line, in a file that survives being killed in the middle of a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.tracking.base import plain
from state.stored import Malformed, parse_object


@dataclass(frozen=True, slots=True)
class Repair:
    """What was taken out of a file before it was continued."""

    torn_bytes: int = 0
    unreadable_lines: int = 0
    later_lines: int = 0

    def __bool__(self) -> bool:
        return self != Repair()


def repair(path: Path, start_step: int) -> Repair:
    """Make `path` what it was before step `start_step`.

    Take out a torn last line (one without a line end), lines that are no JSON object with a `step`, and those of steps
    that will run again. They are not lost: `set_aside(path)` takes them. The file is replaced atomically, and only if
    there is something to take out.
    """
    if not path.exists():
        return Repair()
    content = path.read_bytes()
    *lines, torn = content.split(b"\n")
    kept: list[bytes] = []
    unreadable: list[bytes] = []
    later: list[bytes] = []
    for line in lines:
        step = _step_of(line)
        (unreadable if step is None else later if step >= start_step else kept).append(line + b"\n")
    found = Repair(torn_bytes=len(torn), unreadable_lines=len(unreadable), later_lines=len(later))
    if found:
        with set_aside(path).open("ab") as file:
            file.writelines([*unreadable, *later, *([torn + b"\n"] if torn else [])])
            file.flush()
            os.fsync(file.fileno())
        replacement = path.with_name(path.name + ".repaired")
        with replacement.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(path)
    return found


def set_aside(path: Path) -> Path:
    """Where what was taken out of `path` is kept: `metrics.before.jsonl` beside `metrics.jsonl`."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


def _step_of(line: bytes) -> int | None:
    try:
        step = parse_object(line).get("step")
    except Malformed:
        return None
    return step if isinstance(step, int) else None


class JsonlTracker:
    """Appends `{"step": ..., **metrics}`; every line is on its way to the disk when `log` returns.

    On opening, the file is repaired to where `start_step` continues it: `repaired` says what was taken out.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.repaired = repair(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        record = {"step": step, **{key: plain(value) for key, value in metrics.items()}}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
