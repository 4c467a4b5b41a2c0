"""What happened, in order: a bounded memory of it, and an append-only JSONL file that survives a kill at any byte."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from state.errors import ResumeError
from state.stored import Malformed, parse_object, shown

REMEMBERED = 512
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
WRITER_GONE_S = 30.0
"""How long a new writer waits until the one before has ended: a process that was killed may take a moment."""


class JournalDamaged(ResumeError):
    """A journal holds a whole line that is no entry: it is neither read past it nor written on."""


class Journal:
    """One writer per file: a process that opens it waits until another one that has it open has ended. Entries are
    numbered by `seq` from 1, without gaps, over all processes that wrote the file.

    A line is one write of one complete line, so a reader sees whole entries and at most one torn tail; opening the
    file for writing cuts that tail and says so in an entry of kind `recovered`.
    """

    def __init__(self, path: Path, source: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._lock = threading.Lock()
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _own(self._fd, path)
        whole, torn = _split(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
        self._seq = _last_seq(whole, path)
        if torn:
            os.ftruncate(self._fd, len(whole))
            self.append("recovered", torn_bytes=torn)

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one entry and return it. `at` is wall time in seconds, for people: order is by `seq`."""
        with self._lock:
            seq = self._seq + 1
            entry = {"seq": seq, "kind": kind, "source": self._source, "at": round(time.time(), 6), **fields}
            line = (_ENCODE(entry) + "\n").encode()
            self._write(line)
            self._seq = seq  # only now: an entry that could not be written leaves no gap
            self._recent.append(entry)
            for listener in self._listeners:
                listener(entry)
            return entry

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Tell `listener` each entry from now on, once it is written. It must be quick and never raise."""
        self._listeners.append(listener)

    def recent(self) -> tuple[dict[str, Any], ...]:
        """The newest entries of this process, oldest first, at most 512."""
        return tuple(self._recent)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, line: bytes) -> None:
        """All of the line or, when the disk refuses part of it, nothing: the next line must not join a torn one."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise


def _own(fd: int, path: Path) -> None:
    """Lock the file for this process until it ends, or closes any descriptor of this file. File systems without locks
    are believed."""
    deadline = time.monotonic() + WRITER_GONE_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return
            if time.monotonic() >= deadline:
                os.close(fd)
                raise BlockingIOError(
                    f"{path} is still written by another process after {WRITER_GONE_S:g} s: is the same run going on?"
                ) from error
            time.sleep(0.05)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The whole entries of a journal file; a torn tail is left out. A damaged line raises `JournalDamaged`."""
    whole, _ = _split(path.read_bytes() if path.exists() else b"")
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        yield _entry(line, f"{path}:{number}")


def require_whole(path: Path) -> None:
    """`JournalDamaged` unless the next process can write on where this file ends."""
    _last_seq(_split(path.read_bytes())[0], path)


def _split(content: bytes) -> tuple[bytes, int]:
    end = content.rfind(b"\n") + 1
    return content[:end], len(content) - end


def _last_seq(whole: bytes, path: Path) -> int:
    if not whole:
        return 0
    seq: int = _entry(whole[:-1].rsplit(b"\n", 1)[-1], f"the last line of {path}")["seq"]
    return seq


def _entry(line: bytes, where: str) -> dict[str, Any]:
    """One line, which has at least a number and a kind."""
    try:
        entry = parse_object(line)
        if type(entry.get("seq")) is not int or type(entry.get("kind")) is not str:
            raise Malformed(f"holds {shown(entry)}, without a number `seq` and a text `kind`")
    except Malformed as error:
        raise JournalDamaged(
            f"{where} is not a journal entry: it {error}. Cut the file off before that line, or use another run.dir"
        ) from error
    return entry
