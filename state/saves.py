"""Writing checkpoints so that a kill at any moment leaves the newest complete one loadable.

A save is data, then the marker, then the tracker by atomic rename, then retention (`state.checkpoints` says what stands
where). Every file that a reader trusts is written to a temporary name, flushed, and renamed; a directory that is to go
is renamed first, so that no half-deleted one can pass for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from state.checkpoints import (
    DATA,
    INCOMPLETE,
    MARKER,
    PROBE,
    RELEASE,
    TRACKER,
    Inventory,
    classify,
    inspect,
    iteration_dir,
    parse_tracker,
    release_dir,
)
from state.continuity import Probe
from state.errors import CheckpointError

_DISCARDED = ".slotwise-discarded-"


def begin(root: str | os.PathLike[str], iteration: int) -> Path:
    """An empty directory to save `iteration` into, marked as incomplete until `commit`.

    An earlier one of ours with that number is replaced (a run that went back trains it again); if the tracker names
    it, the tracker is first moved to the newest complete one before it. `CheckpointError` if somebody else wrote it.
    """
    target = iteration_dir(root, iteration)
    if target.exists():
        inventory = inspect(root)
        _refuse_foreign(target)
        if inventory.tracker is not None and parse_tracker(inventory.tracker) == iteration:
            _move_tracker_back(inventory, iteration)
    return _begin(target)


def begin_release(root: str | os.PathLike[str]) -> Path:
    """An empty `release` directory, marked incomplete until `commit_release`; the tracker stops naming an old one."""
    target = release_dir(root)
    if target.exists():
        inventory = inspect(root)
        _refuse_foreign(target)
        if inventory.tracker is not None and parse_tracker(inventory.tracker) == "release":
            _remove_tracker(inventory)
    return _begin(target)


def begin_export(target: Path) -> Path:
    """An empty, hidden directory beside `target`, which takes its place in `commit_export`.

    An earlier export of ours is left until then. `CheckpointError` if somebody else wrote what stands there.
    """
    if target.exists():
        _refuse_foreign(target)
    return _begin(target.with_name(f".{target.name}.export"))


def commit_export(partial: Path, target: Path, marker: Mapping[str, Any]) -> None:
    """Let a whole export appear as `target`."""
    _commit(partial, marker)
    if target.exists():
        _discard(target)
    partial.rename(target)
    _sync(target.parent)


def commit(
    root: str | os.PathLike[str],
    iteration: int,
    marker: Mapping[str, Any],
    keep: int | None,
    protect: Collection[int] = (),
) -> None:
    """Make a save that was begun the one to continue from: data, marker, tracker, retention, in this order.

    `keep` is the number of complete iterations to leave (None: all); those in `protect` are left beside them.
    """
    _commit(iteration_dir(root, iteration), {**marker, "iteration": iteration})
    _write_atomically(Path(root) / TRACKER, f"{iteration}\n".encode())
    retain(root, keep, protect)


def retain(root: str | os.PathLike[str], keep: int | None, protect: Collection[int] = ()) -> None:
    """Remove what `surplus` says, and nothing where `keep` is None."""
    if keep is not None:
        for doomed in surplus(inspect(root), keep, protect):
            _discard(iteration_dir(root, doomed))


def commit_release(root: str | os.PathLike[str], marker: Mapping[str, Any]) -> None:
    """Make converted weights the ones that the tracker names."""
    _commit(release_dir(root), marker)
    _write_atomically(Path(root) / TRACKER, f"{RELEASE}\n".encode())


def surplus(inventory: Inventory, keep: int, protect: Collection[int] = ()) -> tuple[int, ...]:
    """Iterations that retention removes, decided from what is on disk alone.

    The tracker's iteration and the newest before it stay, `keep` in all. Newer ones belong to a branch that was left
    and are not counted; they are replaced when the run reaches them. Cut-off saves before the tracker's go as well.
    """
    named = parse_tracker(inventory.tracker) if inventory.tracker is not None else None
    if not isinstance(named, int):
        return ()
    past = [n for n in inventory.ours if n <= named]
    old = past[: max(0, len(past) - keep)]
    cut_off = [i.iteration for i in inventory.incomplete if i.iteration is not None and i.iteration < named]
    return tuple(sorted(n for n in {*old, *cut_off} if n != named and n not in protect))


def write_data(directory: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Store the trained cursor beside the weights; before `commit`."""
    _write_atomically(Path(directory) / DATA, json.dumps(data).encode())


def write_probe(directory: str | os.PathLike[str], probe: Probe) -> None:
    """Store what the gang computes on a fixed batch; before `commit`."""
    _write_atomically(Path(directory) / PROBE, json.dumps(probe.to_json()).encode())


def _refuse_foreign(target: Path) -> None:
    if classify(target) in ("megatron", "foreign"):
        raise CheckpointError(
            f"{target} was not written by Slotwise and is not replaced; save to another directory (checkpoint.save)"
        )


def _begin(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{_DISCARDED}*"):
        _remove(leftover)
    if os.path.lexists(target):
        _discard(target)
    target.mkdir()
    _write_atomically(target / INCOMPLETE, b"A save is under way here, or was cut off.\n")
    _sync(target.parent)
    return target


def _commit(directory: Path, marker: Mapping[str, Any]) -> None:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is gone: nothing to commit")
    for parent, _, files in os.walk(directory):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))
    _write_atomically(directory / MARKER, json.dumps(marker, indent=1).encode())
    (directory / INCOMPLETE).unlink(missing_ok=True)
    _sync(directory)


def _move_tracker_back(inventory: Inventory, iteration: int) -> None:
    before = [n for n in inventory.complete if n < iteration]
    if before:
        _write_atomically(Path(inventory.tracker_path), f"{before[-1]}\n".encode())
    else:
        _remove_tracker(inventory)


def _remove_tracker(inventory: Inventory) -> None:
    Path(inventory.tracker_path).unlink()
    _sync(Path(inventory.path))


def _discard(directory: Path) -> None:
    doomed = directory.with_name(_DISCARDED + directory.name)
    if os.path.lexists(doomed):
        _remove(doomed)
    directory.rename(doomed)
    _sync(directory.parent)
    _remove(doomed)


def _remove(path: Path) -> None:
    """What a link leads to stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
