"""Reading a growing JSONL file on from where the last read stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from state.stored import Malformed, parse_object


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line: what it says, and the byte it begins at."""

    entry: Mapping[str, Any]
    offset: int


@dataclass(slots=True)
class Tail:
    """A last line that is torn waits for its rest. `damaged` counts lines that are no JSON objects, or that `fault`
    finds something wrong with; they are skipped.

    A file that was replaced or has shrunk is read again from its start, which `restarts` counts.
    """

    path: Path
    fault: Callable[[Mapping[str, Any]], str | None] = field(default=lambda entry: None)
    restarts: int = 0
    damaged: int = 0
    _offset: int = 0
    _inode: int = field(default=-1)

    def read(self) -> list[Line]:
        """The lines that are new since the last call; none while the file is not there."""
        try:
            with self.path.open("rb") as file:
                self._notice_another(file.fileno())
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        lines = []
        for raw in whole.splitlines(keepends=True):
            entry = _entry(raw)
            if entry is None or self.fault(entry) is not None:
                self.damaged += 1
            else:
                lines.append(Line(entry, self._offset))
            self._offset += len(raw)
        return lines

    def at(self, offset: int) -> Mapping[str, Any]:
        """The line that begins at `offset`, which `read` has returned."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return _entry(file.readline()) or {}

    def _notice_another(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if self._inode not in (-1, status.st_ino) or status.st_size < self._offset:
            self._offset, self.damaged = 0, 0
            self.restarts += 1
        self._inode = status.st_ino


def _entry(raw: bytes) -> Mapping[str, Any] | None:
    try:
        return parse_object(raw)
    except Malformed:
        return None
