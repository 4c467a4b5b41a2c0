"""A journal survives a kill at any byte, and its numbers have no gaps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from state.journal import REMEMBERED, Journal, JournalDamaged, read_journal

ROOT = Path(__file__).resolve().parents[2]


def test_entries_are_numbered_from_one_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j.jsonl"
    journal = Journal(path, "actor/0")
    journal.append("a", x=1)
    journal.append("b", y="é\n")
    entries = list(read_journal(path))
    assert [(e["seq"], e["kind"], e["source"]) for e in entries] == [(1, "a", "actor/0"), (2, "b", "actor/0")]
    assert entries[1]["y"] == "é\n"
    assert journal.recent() == tuple(entries)


def test_a_second_process_goes_on_counting(tmp_path: Path) -> None:
    Journal(tmp_path / "j", "s").append("a")
    Journal(tmp_path / "j", "s").append("b")
    assert [e["seq"] for e in read_journal(tmp_path / "j")] == [1, 2]


def test_a_kill_at_any_byte_costs_the_torn_entry_only(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, "s")
    for i in range(3):
        journal.append("a", i=i)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        assert [e["seq"] for e in read_journal(path)] == list(range(1, whole + 1))
        Journal(path, "s").append("after")
        entries = list(read_journal(path))
        assert [e["seq"] for e in entries] == list(range(1, len(entries) + 1))
        assert entries[-1]["kind"] == "after"
        assert ("recovered" in [e["kind"] for e in entries]) == (not content[:cut].endswith(b"\n") and cut > 0)


def test_writers_that_were_killed_leave_whole_entries_and_the_next_goes_on(tmp_path: Path) -> None:
    path, command = tmp_path / "j", [sys.executable, "-m", "tests.state.journal_writer"]
    for _ in range(3):
        with subprocess.Popen([*command, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            writer.kill()
    Journal(path, "actor/0").append("after")
    entries = list(read_journal(path))
    assert [e["seq"] for e in entries] == list(range(1, len(entries) + 1))
    assert [e["number"] for e in entries if e["kind"] == "a"].count(0) == 3


def test_a_writer_that_was_killed_is_waited_for_and_a_living_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    command = [sys.executable, "-m", "tests.state.journal_writer", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"writing\n"
        monkeypatch.setattr("state.journal.WRITER_GONE_S", 0.1)
        with pytest.raises(BlockingIOError, match="still written by another process"):
            Journal(path, "actor/0")
        monkeypatch.undo()
        threading.Timer(0.2, other.kill).start()
        Journal(path, "actor/0").append("after")
        assert other.wait() == -9
    entries = list(read_journal(path))
    assert [e["seq"] for e in entries] == list(range(1, len(entries) + 1))
    assert entries[-1]["kind"] == "after"


def test_damage_in_the_middle_is_not_read_over(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"seq":1,"kind":"a"}\nxx\n{"seq":3,"kind":"a"}\n')
    with pytest.raises(JournalDamaged, match=":2 is not a journal entry"):
        list(read_journal(path))


def test_an_entry_that_cannot_be_written_leaves_no_gap(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "s")
    with pytest.raises(TypeError):
        journal.append("a", path=object())
    journal.append("b")
    assert [(e["seq"], e["kind"]) for e in read_journal(tmp_path / "j")] == [(1, "b")]


def test_a_full_disk_leaves_no_half_line_for_the_next_to_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = Journal(path, "s")
    journal.append("a")
    real, calls = os.write, iter(range(2))

    def write(fd: int, data: bytes) -> int:
        if next(calls) == 0:
            return real(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("state.journal.os.write", write)
    with pytest.raises(OSError, match="No space"):
        journal.append("b")
    monkeypatch.undo()
    journal.append("c")
    assert [(e["seq"], e["kind"]) for e in read_journal(path)] == [(1, "a"), (2, "c")]


def test_memory_is_bounded_and_writers_may_be_threads(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "s")
    threads = [threading.Thread(target=lambda: [journal.append("a") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [e["seq"] for e in read_journal(tmp_path / "j")] == list(range(1, 801))
    assert len(journal.recent()) == REMEMBERED
    assert journal.recent()[-1]["seq"] == 800
