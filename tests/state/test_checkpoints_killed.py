"""A save that is killed at any moment leaves the newest complete checkpoint to continue from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from state import checkpoints, saves
from state.resume import LoadSpec, ResumePlan, ResumeRequest, plan_resume
from tests.state.kill_points import killed_at_every_change

PARTS = ("__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing guards against power cuts; a kill leaves what the kernel has."""
    monkeypatch.setattr(saves.os, "fsync", lambda descriptor: None)


def save(root: Path, iteration: int, keep: int | None) -> None:
    """As a run does it; the weights in several files."""
    directory = saves.begin(root, iteration)
    saves.write_data(directory, {"cursor": iteration})
    for part in PARTS:
        with (directory / part).open("w") as file:
            json.dump({"part": part, "of": iteration}, file)
    saves.commit(root, iteration, {"iteration": iteration}, keep)


def plan(root: Path) -> ResumePlan:
    return plan_resume(ResumeRequest(str(root), LoadSpec.random()), checkpoints.inspect(root))


def check_whole(root: Path, iteration: int) -> None:
    directory = checkpoints.iteration_dir(root, iteration)
    assert checkpoints.read_marker(directory).iteration == iteration
    assert checkpoints.read_data(directory) == {"cursor": iteration}
    for part in PARTS:
        assert json.loads((directory / part).read_text()) == {"part": part, "of": iteration}


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_the_next_save_of_a_run(tmp_path: Path, keep: int | None) -> None:
    def work(number: int) -> None:
        save(tmp_path / str(number), 5, keep)

    def before(number: int) -> Path:
        root = tmp_path / str(number)
        for iteration in (3, 4):
            save(root, iteration, None)
        (root / "notes").mkdir()
        return root

    root, found = before(0), []
    for number in killed_at_every_change(work):
        made = plan(root)
        assert made.source == "native"
        assert made.iteration in (4, 5)
        check_whole(root, made.iteration)
        found.append(made.iteration)
        save(root, 5, keep)
        assert plan(root).iteration == 5
        check_whole(root, 5)
        assert (root / "notes").is_dir()
        root = before(number + 1)
    assert len(found) > 12
    assert found == sorted(found)
    # Between marker and tracker the new one is whole, and the tracker still decides; retention comes after both.
    assert set(found) == ({4} if keep is None else {4, 5})


def test_the_first_save_of_a_run(tmp_path: Path) -> None:
    sources = []
    for number in killed_at_every_change(lambda number: save(tmp_path / str(number), 0, keep=1)):
        made = plan(tmp_path / str(number))
        sources.append(made.source)
        if made.source == "native":
            check_whole(tmp_path / str(number), 0)
    assert set(sources) == {"fresh", "native"}
    assert sources == sorted(sources)


def test_a_save_over_one_that_the_tracker_names(tmp_path: Path) -> None:
    """A run that went back trains iteration 4 again."""

    def before(number: int) -> Path:
        root = tmp_path / str(number)
        for iteration in (3, 4):
            save(root, iteration, None)
        return root

    root = before(0)
    for number in killed_at_every_change(lambda number: save(tmp_path / str(number), 4, keep=None)):
        made = plan(root)
        assert made.iteration in (3, 4)
        check_whole(root, made.iteration)
        root = before(number + 1)
