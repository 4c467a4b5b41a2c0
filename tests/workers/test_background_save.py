"""A rank that saves in the background: what it copied is written beside training, once, and its failure is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from state.journal import read_journal
from state.slots import Slot
from tests.workers.gang_processes import GangFailed, run_gang
from tests.workers.rank_jobs import EVERY, SLOTS, Setting
from tests.workers.test_rank_slots import continued

JOBS = "tests.workers.background_jobs"
NO_TEACHER = EVERY.model_copy(update={"use_opd": False})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Two data-parallel ranks save in the background after rollout 2 and train on rollout 3 while that is written."""
    root = tmp_path_factory.mktemp("background")
    setting = Setting(root / "run", slots=SLOTS[:2], algorithm=NO_TEACHER)
    return root, run_gang(f"{JOBS}:saves_and_trains_on", 2, (setting, root / "saved"))


def test_a_rank_trains_on_while_it_writes_and_saves_nothing_else_meanwhile(saved: tuple[Path, list[Any]]) -> None:
    _, ranks = saved
    for rank, told in enumerate(ranks):
        assert told.files_while_training == []
        assert told.second == f"RuntimeError: run/actor/{rank} was asked for second while save-2 is written"
        assert told.other == f"RuntimeError: run/actor/{rank} was asked about save-9 while it writes save-2"
        assert told.version == 4


def test_every_slot_comes_back_as_it_was_agreed_on(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    root, ranks = saved
    agreed = ranks[0].digests
    assert sorted(agreed) == ["actor", "old_actor@1", "old_actor@2", "ref@2"]
    setting = Setting(
        tmp_path,
        slots=continued(root / "saved", 2, agreed),
        algorithm=NO_TEACHER,
        load_optimizer=True,
        incarnation=2,
    )
    (resumed,) = run_gang("tests.workers.rank_jobs:train_on", 1, (setting, tmp_path, 3, 3, -1))
    assert resumed.digests == agreed
    assert resumed.live_after_init == agreed[Slot.ACTOR]


def test_each_rank_journals_that_its_part_is_on_disk_after_what_it_did_meanwhile(
    saved: tuple[Path, list[Any]],
) -> None:
    root, _ = saved
    for rank in range(2):
        entries = list(read_journal(root / "run" / "journal" / f"actor-{rank}.jsonl"))
        (written,) = [entry for entry in entries if entry["kind"] == "written"]
        commits = [entry["seq"] for entry in entries if entry.get("trigger") == "commit"]
        assert (written["publish_id"], written["rank"], written["incarnation"]) == ("save-2", rank, 1)
        assert written["seq"] > commits[-1]
        assert (written["nbytes"] > 0) == (rank == 0)  # of replicas the first one writes


def test_a_write_that_fails_says_which_rank_and_why(tmp_path: Path) -> None:
    setting = Setting(tmp_path / "run", slots=SLOTS[:2], algorithm=NO_TEACHER)
    with pytest.raises(GangFailed, match=r"WriteFailed: run/actor/0 could not write save-0: OSError: .*No space left"):
        run_gang(f"{JOBS}:fails_to_write", 1, (setting, tmp_path / "saved"))
    (failed,) = [
        entry for entry in read_journal(tmp_path / "run/journal/actor-0.jsonl") if entry["kind"] == "write_failed"
    ]
    assert "No space left" in failed["reason"]


def test_a_write_that_takes_too_long_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    setting = Setting(tmp_path / "run", slots=SLOTS[:2], algorithm=NO_TEACHER)
    with pytest.raises(GangFailed, match=r"WriteFailed: run/actor/0 has not written save-0 within 0.05 s"):
        run_gang(f"{JOBS}:is_stuck", 1, (setting, tmp_path / "saved"))
