"""Saves in the background, as journals show them: one at a time, complete on every rank before the tracker moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from state.audit import audit
from state.journal import Journal
from tests.state.journal_edits import drop, edit, entries, find, findings, found, update, write
from tests.state.test_audit import killed_at
from tests.state.toy_run import ToyRun


def background_run(directory: Path) -> None:
    """Four rollouts; the saves after 0 and 2 are written while the next rollout is trained and published."""
    run = ToyRun(directory)
    run.begin()
    run.publish()
    for saved in (0, 2):
        run.train(saved)
        quorum = run.begin_save(saved)
        run.publish()
        run.train(saved + 1)
        run.complete_save(quorum, saved)
        run.publish()
    run.finish()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("background") / "run"
    background_run(directory)
    return directory


def test_a_sound_run_has_no_findings(sound: Path) -> None:
    assert findings(sound) == []
    report = f"{audit(sound).summary()}\n{audit(sound).timeline()}"
    assert "2 saves" in report
    assert "as iteration 2 in the background" in report


def test_a_kill_at_any_moment_is_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, moments = tmp_path / "source", list[dict[str, int]]()
    real = Journal.append

    def append(journal: Journal, kind: str, **fields: Any) -> dict[str, Any]:
        entry = real(journal, kind, **fields)
        moments.append({p.name: p.stat().st_size for p in (source / "journal").glob("*.jsonl")})
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        background_run(source)
    unfinished = 0
    for number, moment in enumerate(moments[:-3]):  # up to the end of the run, after which engines die
        for torn in (0, 9):
            target = tmp_path / f"{number}-{torn}"
            killed_at(source, moment, target, torn)
            assert findings(target) == [], moment
            unfinished += "begun in the background, and never completed" in str(audit(target))
    assert unfinished > 10


def test_a_save_that_was_completed_before_a_rank_had_written_is_found(run_dir: Path) -> None:
    drop(run_dir, "actor-1", {"kind": "written", "publish_id": "save-1-2"})
    found(run_dir, "I11  actor-1.jsonl  save-1-2 was completed, and actor/1 has not written its copy")


def test_a_save_that_is_never_completed_is_found_unless_the_run_was_cut_short(run_dir: Path) -> None:
    drop(run_dir, "driver", {"kind": "save", "publish_id": "save-1-2"})
    found(run_dir, "save-1-2 was begun in the background, and never completed")
    edit(run_dir, "driver", update(outcome="failed"), kind="run_ended")
    assert findings(run_dir) == []
    assert any("save-1-2 was begun" in str(event) for event in audit(run_dir).events)


def test_two_saves_in_the_background_at_once_are_found(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    first = find(lines, kind="save", publish_id="save-1-0")
    lines.remove(first)
    lines.insert(lines.index(find(lines, kind="save", publish_id="save-1-2")), first)
    write(run_dir, "driver", lines)
    found(run_dir, "save-1-2 was begun while save-1-0 was not complete")


def test_a_save_that_completes_as_another_than_it_began_is_found(run_dir: Path) -> None:
    edit(run_dir, "driver", update(digest="f" * 16, iteration=1), kind="save", publish_id="save-1-0")
    for what in ("digest", "iteration"):
        found(run_dir, f"save-1-0 was completed with another {what} than it was begun with")


def test_a_save_that_completes_twice_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    again = dict(find(lines, kind="save", publish_id="save-1-0"))
    write(run_dir, "driver", [*lines[:-1], again, lines[-1]])
    found(run_dir, "quorum save-1-0 was used twice")


def test_a_copy_that_nobody_let_out_or_that_is_written_twice_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "actor-0")
    written = find(lines, kind="written")
    write(run_dir, "actor-0", [*lines, dict(written)])
    found(run_dir, "the copy of save-1-0 was written twice")
    write(run_dir, "actor-0", [*lines, {**written, "publish_id": "publish-1-1"}])
    found(run_dir, "a copy was written of publish-1-1, which had let no copy out")


def test_a_copy_of_what_no_rank_was_asked_for_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    write(run_dir, "driver", [entry for entry in lines if entry.get("publish_id") != "save-1-0"])
    found(run_dir, "actor/0 entered save save-1-0, which the driver does not know")


def test_a_write_that_failed_is_an_event(run_dir: Path) -> None:
    lines = entries(run_dir, "actor-0")
    at = lines.index(find(lines, kind="written", publish_id="save-1-2"))
    lines[at] = {**lines[at], "kind": "write_failed", "reason": "OSError: no space"}
    write(run_dir, "actor-0", lines)
    drop(run_dir, "driver", {"kind": "save", "publish_id": "save-1-2"})
    edit(run_dir, "driver", update(outcome="failed"), kind="run_ended")
    assert findings(run_dir) == []
    assert any("actor/0 could not write save-1-2: OSError: no space" in str(e) for e in audit(run_dir).events)
