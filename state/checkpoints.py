"""Checkpoint directories: Megatron's layout, our completeness marker, atomic commit, retention.

    ROOT/latest_checkpointed_iteration.txt   the tracker: `4`, or `release` for converted weights
    ROOT/iter_0000004/                       Megatron's `torch_dist` files
    ROOT/iter_0000004/slots/ref/             another slot that changes during a run, in the same format
    ROOT/iter_0000004/data.json              the trained cursor of the data source
    ROOT/iter_0000004/probe.json             what the gang computed on a fixed batch when it saved
    ROOT/iter_0000004/slotwise.json          the marker: written last, so its presence means complete
    ROOT/iter_0000004/slotwise.incomplete    from `begin` to `commit`: a save of ours is under way or was cut off
    ROOT/release/                            weights alone, no iteration

`torch_dist` writes its `metadata.json` before a save of ours is whole, so that file counts as complete only where
`slotwise.incomplete` does not stand beside it. A directory that has neither is somebody else's and never touched.
Every file that a reader trusts is written to a temporary name, flushed, and renamed; a directory that is to go is
renamed first, so that no half-deleted one can pass for a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from state.continuity import Probe
from state.errors import CheckpointError, ResumeError
from state.slots import Slot
from state.stored import Count, Malformed, Stored, parse, parse_object

T = TypeVar("T")

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MARKER = "slotwise.json"
INCOMPLETE = "slotwise.incomplete"
DATA = "data.json"
SLOTS = "slots"
PROBE = "probe.json"
_MEGATRON_METADATA = "metadata.json"
_DISCARDED = ".slotwise-discarded-"
_ITERATION = re.compile(r"iter_([0-9]{7,18})")
_IN_TRACKER = re.compile(r"[0-9]{1,18}")


class MarkedSlot(Stored):
    """A slot that an iteration holds beside the actor."""

    slot: Annotated[Slot, Field(strict=False)]
    version: Count
    digest: str


class Marker(Stored):
    """What a marker says of the weights beside it. Whoever relies on a field must ask whether it is there: markers of
    converted weights have no more than `digest` and `dtype`."""

    role: Literal[Slot.ACTOR, Slot.CRITIC] = Slot.ACTOR
    iteration: Count | None = None
    incarnation: Count | None = None
    digest: str | None = None
    dtype: str | None = None
    slots: list[MarkedSlot] | None = None
    fingerprint: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A save of ours that was cut off. `iteration` is None for `release`."""

    iteration: int | None
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What stands in a checkpoint directory, read once."""

    path: str
    exists: bool
    tracker: str | None = None
    """Text of the tracker as it stands, None when there is none."""
    ours: tuple[int, ...] = ()
    """Complete iterations with our marker, ascending."""
    megatron: tuple[int, ...] = ()
    """Complete iterations that Megatron itself wrote, ascending."""
    without_data: tuple[int, ...] = ()
    """Those of `ours` whose data cursor is missing or cannot be read; a critic's has none to miss."""
    critics: tuple[int, ...] = ()
    """Those of `ours` that hold a critic, whose weights are no policy's."""
    incomplete: tuple[Incomplete, ...] = ()
    has_release: bool = False
    foreign: tuple[str, ...] = ()
    """Names of other entries; hidden ones are not counted."""
    is_huggingface: bool = False

    @property
    def complete(self) -> tuple[int, ...]:
        return tuple(sorted({*self.ours, *self.megatron}))

    @property
    def tracker_path(self) -> str:
        return str(Path(self.path) / TRACKER)

    @property
    def is_empty(self) -> bool:
        """Nothing that could be continued from, nor anything that somebody else put there."""
        return self.tracker is None and not (self.complete or self.incomplete or self.has_release or self.foreign)


def iteration_dir(root: str | os.PathLike[str], iteration: int) -> Path:
    """Directory of one iteration, as Megatron names it."""
    return Path(root) / f"iter_{iteration:07d}"


def release_dir(root: str | os.PathLike[str]) -> Path:
    """Directory of weights without an iteration, as Megatron names it."""
    return Path(root) / RELEASE


def slot_part(slot: Slot, version: int) -> str:
    """Directory inside an iteration for a slot that is kept beside the actor's weights."""
    return f"{SLOTS}/{slot}" if slot is not Slot.OLD_ACTOR else f"{SLOTS}/{slot}-{version:07d}"


def parse_tracker(text: str) -> int | Literal["release"] | None:
    """The iteration a tracker names, or `release`; None when it holds neither."""
    word = text.strip()
    if word == RELEASE:
        return "release"
    return int(word) if _IN_TRACKER.fullmatch(word) else None


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


def inspect(root: str | os.PathLike[str]) -> Inventory:
    """Read what stands in a checkpoint directory. `ResumeError` when it cannot be listed."""
    path = Path(root)
    try:
        return _inventory(path) if path.exists() else Inventory(path=str(path), exists=False)
    except OSError as error:
        about = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise ResumeError(f"{path} cannot be read as a checkpoint directory: {error.strerror}{about}") from error


def _inventory(path: Path) -> Inventory:
    ours, critics, megatron, without_data, incomplete, foreign = [], [], [], [], [], []
    has_release = False
    for entry in sorted(path.iterdir()):
        match = _ITERATION.fullmatch(entry.name)
        if entry.name == TRACKER or entry.name.startswith("."):
            continue
        iteration = int(match[1]) if match else None
        if entry.name != (RELEASE if iteration is None else iteration_dir(path, iteration).name):
            foreign.append(entry.name)
            continue
        verdict = _classify(entry, iteration)
        if isinstance(verdict, Incomplete):
            incomplete.append(Incomplete(iteration, entry.name, verdict.why))
        elif verdict == "foreign":
            foreign.append(entry.name)
        elif iteration is None:
            has_release = True
        elif verdict == "ours":
            ours.append(iteration)
            if read_marker(entry).role == Slot.CRITIC:
                critics.append(iteration)
            elif not _is_object(entry / DATA):
                without_data.append(iteration)
        else:
            megatron.append(iteration)
    tracker = path / TRACKER
    text = tracker.read_text(errors="replace") if tracker.exists() else None
    weights = any(n.endswith(".safetensors") or n.startswith("pytorch_model") for n in foreign)
    native = text is not None or ours or megatron or incomplete or has_release
    return Inventory(
        path=str(path),
        exists=True,
        tracker=text,
        ours=tuple(sorted(ours)),
        megatron=tuple(sorted(megatron)),
        without_data=tuple(sorted(without_data)),
        critics=tuple(sorted(critics)),
        incomplete=tuple(incomplete),
        has_release=has_release,
        foreign=tuple(foreign),
        is_huggingface=not native and weights and "config.json" in foreign,
    )


def read_marker(directory: str | os.PathLike[str]) -> Marker:
    """The marker of a complete checkpoint of ours. `ResumeError` when it is missing or not whole."""
    return _read(Path(directory) / MARKER, Marker)


def write_data(directory: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Store the trained cursor beside the weights; before `commit`."""
    _write_atomically(Path(directory) / DATA, json.dumps(data).encode())


def read_data(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The trained cursor of a checkpoint of ours. `ResumeError` when it is missing or torn."""
    return _read(Path(directory) / DATA, dict[str, Any])


def write_probe(directory: str | os.PathLike[str], probe: Probe) -> None:
    """Store what the gang computes on a fixed batch; before `commit`."""
    _write_atomically(Path(directory) / PROBE, json.dumps(probe.to_json()).encode())


def read_probe(directory: str | os.PathLike[str]) -> Probe | None:
    """What the gang computed when it saved; None where that was not stored. `ResumeError` when it is not whole."""
    path = Path(directory) / PROBE
    return _read(path, Probe) if path.exists() else None


def _classify(directory: Path, iteration: int | None = None) -> Incomplete | Literal["ours", "megatron", "foreign"]:
    """`iteration` of the directory, where it is one: its marker must be about it."""
    if not directory.is_dir():
        return "foreign"
    if (directory / MARKER).exists():
        wrong = _marker_fault(directory / MARKER, iteration)
        return "ours" if wrong is None else Incomplete(None, directory.name, f"{MARKER} {wrong}")
    if (directory / INCOMPLETE).exists():
        return Incomplete(None, directory.name, "the save was cut off")
    if all(entry.name.startswith(".") for entry in directory.iterdir()):
        return Incomplete(None, directory.name, "empty")
    return "megatron" if _is_object(directory / _MEGATRON_METADATA) else "foreign"


def _refuse_foreign(target: Path) -> None:
    if _classify(target) in ("megatron", "foreign"):
        raise CheckpointError(
            f"{target} was not written by Slotwise and is not replaced; save to another directory (checkpoint.save)"
        )


def _begin(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{_DISCARDED}*"):
        shutil.rmtree(leftover)
    if target.exists():
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
    if doomed.exists():
        shutil.rmtree(doomed)
    directory.rename(doomed)
    _sync(directory.parent)
    shutil.rmtree(doomed)


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


def _marker_fault(path: Path, iteration: int | None) -> str | None:
    """Why the marker cannot be believed; None: it can."""
    try:
        marker = parse(Marker, path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except Malformed as error:
        return str(error)
    if iteration is not None and marker.iteration != iteration:
        about = "no iteration" if marker.iteration is None else f"iteration {marker.iteration}"
        return f"is about {about}, and stands in {path.parent.name}"
    return None


def _is_object(path: Path) -> bool:
    try:
        parse_object(path.read_bytes())
    except (OSError, Malformed):
        return False
    return True


def _read(path: Path, kind: type[T]) -> T:
    """The one place where a file of a checkpoint is believed."""
    try:
        return parse(kind, path.read_bytes())
    except (OSError, Malformed) as error:
        wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        wrong = "is missing" if isinstance(error, FileNotFoundError) else wrong
        raise ResumeError(f"{path} {wrong}; another iteration can be named with ckpt_step") from error
