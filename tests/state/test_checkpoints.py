"""Checkpoint directories on a real disk: what counts as complete, what a kill leaves, what retention removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state import checkpoints, saves
from state.checkpoints import Incomplete, Inventory, inspect, iteration_dir
from state.errors import CheckpointError, ResumeError
from state.saves import begin, commit, surplus


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def torch_dist(directory: Path) -> None:
    """Files such as Megatron's `torch_dist` writes, `metadata.json` among them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "__0_0.distcp").write_bytes(b"weights")
    (directory / ".metadata").write_bytes(b"index")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def save(root: Path, iteration: int, keep: int | None = None) -> Path:
    directory = begin(root, iteration)
    torch_dist(directory)
    saves.write_data(directory, {"cursor": iteration})
    commit(root, iteration, {"iteration": iteration}, keep)
    return directory


def tracker(root: Path) -> str:
    return (root / checkpoints.TRACKER).read_text().strip()


def test_a_save_is_complete_named_by_the_tracker_and_readable(tmp_path: Path) -> None:
    directory = save(tmp_path, 4)
    assert directory.name == "iter_0000004"
    assert tracker(tmp_path) == "4"
    assert inspect(tmp_path).ours == (4,)
    assert checkpoints.read_marker(directory).iteration == 4
    assert checkpoints.read_data(directory) == {"cursor": 4}
    assert not (directory / checkpoints.INCOMPLETE).exists()


def test_step_zero_is_an_iteration(tmp_path: Path) -> None:
    save(tmp_path, 0)
    assert inspect(tmp_path).ours == (0,)
    assert tracker(tmp_path) == "0"


def test_a_save_cut_off_after_torch_dist_wrote_its_metadata_is_not_complete(tmp_path: Path) -> None:
    torch_dist(begin(tmp_path, 4))
    inventory = inspect(tmp_path)
    assert inventory.complete == ()
    assert [i.name for i in inventory.incomplete] == ["iter_0000004"]


def test_a_directory_that_megatron_wrote_is_complete_but_not_ours(tmp_path: Path) -> None:
    torch_dist(iteration_dir(tmp_path, 7))
    inventory = inspect(tmp_path)
    assert (inventory.ours, inventory.megatron, inventory.complete) == ((), (7,), (7,))


@pytest.mark.parametrize(
    "torn",
    [
        b"",
        b'{"iteration": 4',
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"iteration": 3}',
        b'{"iteration": 4, "slots": {}}',
        b"[" * 9999,
    ],
)
def test_a_damaged_marker_is_named_and_survived(tmp_path: Path, torn: bytes) -> None:
    directory = save(tmp_path, 4)
    (directory / checkpoints.MARKER).write_bytes(torn)
    inventory = inspect(tmp_path)
    assert inventory.complete == ()
    assert "(slotwise.json " in str(inventory.incomplete[0])
    save(tmp_path, 4)
    assert inspect(tmp_path).ours == (4,)


def test_a_missing_or_torn_data_cursor_is_reported(tmp_path: Path) -> None:
    (save(tmp_path, 1) / checkpoints.DATA).unlink()
    (save(tmp_path, 2) / checkpoints.DATA).write_text('{"cursor"')
    save(tmp_path, 3)
    assert inspect(tmp_path).without_data == (1, 2)


@pytest.mark.parametrize("renames_before_the_kill", range(6))
def test_a_kill_at_any_rename_leaves_a_tracker_that_names_a_complete_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames_before_the_kill: int
) -> None:
    save(tmp_path, 4)
    left = iter(range(renames_before_the_kill))
    real = saves.os.replace

    def replace_or_die(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise Killed
        real(source, target)

    monkeypatch.setattr(saves.os, "replace", replace_or_die)
    try:
        save(tmp_path, 5, keep=1)
        died = False
    except Killed:
        died = True
    monkeypatch.undo()
    assert died == (renames_before_the_kill < 4)
    assert int(tracker(tmp_path)) in inspect(tmp_path).complete
    save(tmp_path, 5)
    assert tracker(tmp_path) == "5"


def test_marker_comes_before_tracker_and_tracker_before_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    directory = begin(tmp_path, 2)
    torch_dist(directory)
    seen: list[str] = []
    real = saves._sync

    def record(path: Path) -> None:
        names = [p.name for p in tmp_path.iterdir() if p.name.startswith("iter_")]
        seen.append(f"{(directory / checkpoints.MARKER).exists()} {tracker(tmp_path)} {len(names)}")
        real(path)

    monkeypatch.setattr(saves, "_sync", record)
    commit(tmp_path, 2, {}, keep=1)
    assert list(dict.fromkeys(seen)) == ["False 1 2", "True 1 2", "True 2 2", "True 2 1"]


def test_data_files_are_flushed_before_the_marker_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = begin(tmp_path, 2)
    torch_dist(directory)
    flushed: list[str] = []
    monkeypatch.setattr(saves, "_sync", lambda path: flushed.append(path.name))
    monkeypatch.setattr(saves.os, "replace", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        commit(tmp_path, 2, {}, None)
    assert {"__0_0.distcp", ".metadata", "metadata.json", "iter_0000002"} <= set(flushed)


def test_saving_again_what_the_tracker_names_first_moves_the_tracker_back(tmp_path: Path) -> None:
    for n in (1, 2):
        save(tmp_path, n)
    begin(tmp_path, 2)
    assert tracker(tmp_path) == "1"
    begin(tmp_path, 1)
    assert inspect(tmp_path).tracker is None


def test_a_half_deleted_leftover_never_passes_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dist(begin(tmp_path, 4))

    def die(path: Path) -> None:
        (path / checkpoints.INCOMPLETE).unlink()
        raise Killed

    monkeypatch.setattr(saves.shutil, "rmtree", die)
    with pytest.raises(Killed):
        begin(tmp_path, 4)
    monkeypatch.undo()
    assert inspect(tmp_path).is_empty
    save(tmp_path, 4)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_others_wrote_is_never_replaced(tmp_path: Path) -> None:
    torch_dist(iteration_dir(tmp_path, 7))
    old_format = iteration_dir(tmp_path, 8) / "mp_rank_00"
    old_format.mkdir(parents=True)
    torch_dist(checkpoints.release_dir(tmp_path))
    for refused in (
        lambda: begin(tmp_path, 7),
        lambda: begin(tmp_path, 8),
        lambda: saves.begin_release(tmp_path),
    ):
        with pytest.raises(CheckpointError, match="not written by Slotwise"):
            refused()
    assert old_format.is_dir()


def test_release_weights_are_begun_and_committed_like_an_iteration(tmp_path: Path) -> None:
    torch_dist(saves.begin_release(tmp_path))
    assert not inspect(tmp_path).has_release
    saves.commit_release(tmp_path, {"from": "hf"})
    assert inspect(tmp_path).has_release
    assert tracker(tmp_path) == "release"
    saves.begin_release(tmp_path)
    assert inspect(tmp_path).tracker is None


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for n in (1, 3, 5, 7):
        save(tmp_path, n, keep=2)
    assert inspect(tmp_path).complete == (5, 7)


def test_retention_leaves_other_peoples_directories_and_protected_ones(tmp_path: Path) -> None:
    torch_dist(iteration_dir(tmp_path, 0))
    (tmp_path / "notes").mkdir()
    for n in (1, 2, 3):
        directory = begin(tmp_path, n)
        torch_dist(directory)
        commit(tmp_path, n, {}, keep=1, protect=(1,))
    assert inspect(tmp_path).complete == (0, 1, 3)
    assert (tmp_path / "notes").is_dir()


@given(
    ours=st.sets(st.integers(0, 9)),
    megatron=st.sets(st.integers(10, 12)),
    named=st.integers(0, 9) | st.sampled_from(["release", "", "x"]),
    keep=st.integers(1, 4),
    protect=st.sets(st.integers(0, 9)),
)
def test_retention_never_removes_the_named_the_protected_or_the_foreign(
    ours: set[int], megatron: set[int], named: int | str, keep: int, protect: set[int]
) -> None:
    inventory = Inventory("r", True, str(named), tuple(sorted(ours)), tuple(sorted(megatron)))
    doomed = set(surplus(inventory, keep, protect))
    assert doomed <= ours - protect - {named}
    if isinstance(named, int):
        assert len({n for n in ours - doomed - protect if n <= named}) <= keep
        assert not any(n > named for n in doomed)


def test_retention_clears_cut_off_saves_that_were_passed() -> None:
    cut = (Incomplete(2, "iter_0000002", ""), Incomplete(9, "iter_0000009", ""), Incomplete(None, "release", ""))
    assert surplus(Inventory("r", True, "4", (3, 4), incomplete=cut), keep=2) == (2,)


def test_an_inventory_tells_apart_what_it_finds(tmp_path: Path) -> None:
    assert not inspect(tmp_path / "absent").exists
    assert inspect(tmp_path).is_empty
    (tmp_path / ".gitkeep").touch()
    assert inspect(tmp_path).is_empty
    (tmp_path / "config.json").write_text("{}")
    assert inspect(tmp_path).foreign == ("config.json",)
    assert not inspect(tmp_path).is_huggingface
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert inspect(tmp_path).is_huggingface
    save(tmp_path, 1)
    assert not inspect(tmp_path).is_huggingface


def test_a_file_is_not_a_checkpoint_directory(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ResumeError, match=r"weights\.bin"):
        inspect(file)


@pytest.mark.parametrize(
    ("text", "named"),
    [("4", 4), ("12\n", 12), ("0", 0), ("release", "release"), (" release\n", "release")]
    + [(bad, None) for bad in ("", "abc", "-1", "1_0", "4.0", "release 4", "٤")],
)
def test_a_tracker_names_an_iteration_or_release(text: str, named: int | str | None) -> None:
    assert checkpoints.parse_tracker(text) == named


def test_a_marker_is_json_that_people_can_read(tmp_path: Path) -> None:
    directory = save(tmp_path, 4)
    assert json.loads((directory / "slotwise.json").read_text())["iteration"] == 4


def test_a_save_of_ours_that_lost_its_marker_is_not_megatrons(tmp_path: Path) -> None:
    directory = checkpoints.iteration_dir(tmp_path, 3)
    directory.mkdir()
    (directory / "metadata.json").write_text("{}")
    assert checkpoints.inspect(tmp_path).megatron == (3,)
    (directory / checkpoints.DATA).write_text("{}")
    found = checkpoints.inspect(tmp_path)
    assert found.megatron == ()
    assert [str(one) for one in found.incomplete] == ["iter_0000003 (slotwise.json is missing beside data.json)"]


def test_a_link_to_an_iteration_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    saves.begin(tmp_path / "old", 1)
    saves.commit(tmp_path / "old", 1, {"digest": "d"}, None)
    root.mkdir()
    checkpoints.iteration_dir(root, 1).symlink_to(checkpoints.iteration_dir(tmp_path / "old", 1))
    for _ in range(2):
        saves.begin(root, 1)
        saves.commit(root, 1, {"digest": "e"}, keep=1)
    assert checkpoints.inspect(tmp_path / "old").ours == (1,)
    assert not checkpoints.iteration_dir(root, 1).is_symlink()
