"""Whatever stands in journals, the audit says what is wrong with it, and never fails itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from state.audit import audit, latest_views
from tests.state.journal_edits import entries, found, write
from tests.state.toy_run import kept_run, whole_run

OTHER: tuple[Any, ...] = (None, "x", -7, 1.5, [], [["x"]], {}, {"a": {"b": 1}}, True, 10**30, "\ud800")
"""Values of every type that JSON has; whatever a field holds, most of them are of another."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    whole_run(directory / "whole")
    kept_run(directory / "kept")
    return directory


@pytest.fixture
def run_dir(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound / "whole", tmp_path / "run")
    return tmp_path / "run"


def looked_at(run_dir: Path) -> None:
    """All that anyone sees of the journals."""
    report = audit(run_dir)
    assert report.summary()
    assert report.timeline() is not None
    json.dumps(report.to_json())
    json.dumps(latest_views(run_dir))


def changed(entry: dict[str, Any], values: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The entry with each of its fields, and those of what it holds, replaced by something else or left out."""
    for field, held in entry.items():
        yield {**entry, field: next(values)}
        yield {key: value for key, value in entry.items() if key != field}
        inside = held if isinstance(held, dict) else held[0] if isinstance(held, list) and held else None
        for key in inside if isinstance(inside, dict) else ():
            other = {**inside, key: next(values)}
            yield {**entry, field: other if isinstance(held, dict) else [other, *held[1:]]}


@pytest.mark.parametrize("name", ["driver", "fleet", "actor-1"])
def test_an_entry_with_any_field_of_another_type_or_none_never_ends_the_audit(
    sound: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(sound / "kept", tmp_path / "run")
    lines, values, seen = entries(tmp_path / "run", name), cycle(OTHER), set()
    for number, line in enumerate(lines):
        kind = (line["kind"], line.get("trigger"), line.get("state"))
        if kind in seen:  # one of each kind
            continue
        seen.add(kind)
        for other in changed(line, values):
            write(tmp_path / "run", name, [*lines[:number], other, *lines[number + 1 :]], renumber=False)
            looked_at(tmp_path / "run")


@pytest.mark.parametrize(
    "line",
    [b"xx", b"[1]", b"\xff\xfe", b"null", b"{}", b'{"seq": "1"}', b"[" * 5000, b'{"seq": ' + b"9" * 5000 + b"}"],
)
def test_a_line_that_is_no_entry_is_found_and_named(run_dir: Path, line: bytes) -> None:
    path = run_dir / "journal" / "actor-0.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:5], line, *lines[6:]]) + b"\n")
    found(run_dir, "actor-0.jsonl:6 is not a journal entry")
    looked_at(run_dir)


def test_a_wrongly_typed_entry_says_which_field_and_what_it_holds(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    number = next(i for i, line in enumerate(lines) if line["kind"] == "trained")
    lines[number]["version"] = "one"
    write(run_dir, "driver", lines)
    found(run_dir, "not an entry of the driver: `version` is 'one'")


def test_a_gang_of_any_size_is_told_in_one_line(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    for line in lines:
        if line["kind"] == "gang_started":
            line["world_size"] = 100_000
    write(run_dir, "driver", lines)
    found(run_dir, "actor/9 and 99990 more have no journal of incarnation 1, a gang of 100000")


def test_a_run_that_ended_before_its_first_entry_is_no_violation(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "driver.jsonl").touch()
    report = audit(tmp_path)
    assert report.findings == ()
    assert "the run ended before its first" in report.summary()
    looked_at(tmp_path)


def test_ranks_that_worked_under_a_driver_that_said_nothing_are_found(run_dir: Path) -> None:
    (run_dir / "journal" / "driver.jsonl").write_bytes(b"")
    found(run_dir, "was in incarnation 1, which the driver does not know")


def test_the_summary_is_short_and_shows_digests_as_slots_does(sound: Path) -> None:
    report = audit(sound / "whole")
    text = report.summary()
    assert len(text.splitlines()) < 25
    assert "actor/0  " in text
    for row in latest_views(sound / "whole")["workers"]:
        assert f"{row['slot']}@{row['incarnation']}.{row['version']} {row['digest'][:12]}\n" in text
        assert row["digest"] not in text
