"""Checkpoint directories: Megatron's layout, our completeness marker, and what stands in one. `saves.py` writes them.

    ROOT/latest_checkpointed_iteration.txt   the tracker: `4`, or `release` for converted weights
    ROOT/iter_0000004/                       Megatron's `torch_dist` files
    ROOT/iter_0000004/slots/ref/             another slot that changes during a run, in the same format
    ROOT/iter_0000004/data.json              the trained cursor of the data source
    ROOT/iter_0000004/probe.json             what the gang computed on a fixed batch when it saved
    ROOT/iter_0000004/slotwise.json          the marker: written last, so its presence means complete
    ROOT/iter_0000004/slotwise.incomplete    from `saves.begin` to `commit`: a save of ours is under way or was cut off
    ROOT/release/                            weights alone, no iteration

`torch_dist` writes its `metadata.json` before a save of ours is whole, so that file counts as complete only where
`slotwise.incomplete` does not stand beside it, nor anything else of ours: a copy that lost the marker is no checkpoint
of Megatron's own. A directory that has none of our files is somebody else's and never touched.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from state.continuity import Probe
from state.errors import ResumeError
from state.slots import Slot
from state.stored import Count, Malformed, Stored, parse, parse_object

T = TypeVar("T")

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MARKER = "slotwise.json"
INCOMPLETE = "slotwise.incomplete"
DATA = "data.json"
RUN_SAVES = "checkpoints"
"""Where a run saves in its own directory, unless told otherwise."""
SLOTS = "slots"
PROBE = "probe.json"
_MEGATRON_METADATA = "metadata.json"
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
    critic: str | None = None
    """Of an actor: the digest of the critic that was saved with it; None: it has none."""
    actor: str | None = None
    """Of a critic: the directory that the actor which it was saved with is saved to."""


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
    def strangers(self) -> tuple[int, ...]:
        """Iterations whose directory has the name and is no checkpoint, ascending."""
        return tuple(sorted(n for n in map(iteration_of, self.foreign) if n is not None))

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


def iteration_of(name: str) -> int | None:
    """The iteration that a directory of this name holds; None: it is of none."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match and iteration_dir("", int(match[1])).name == name else None


def same_place(one: str | os.PathLike[str] | None, other: str | os.PathLike[str] | None) -> bool:
    """Whether two paths lead to one directory, which need not be there yet."""
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


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
        if entry.name == TRACKER or entry.name.startswith("."):
            continue
        iteration = iteration_of(entry.name)
        if iteration is None and entry.name != RELEASE:
            foreign.append(entry.name)
            continue
        verdict = classify(entry, iteration)
        if isinstance(verdict, Incomplete):
            incomplete.append(Incomplete(iteration, entry.name, verdict.why))
        elif verdict == "foreign":
            foreign.append(entry.name)
        elif iteration is None:
            has_release = True
        elif isinstance(verdict, Marker):
            ours.append(iteration)
            if verdict.role == Slot.CRITIC:
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


def read_data(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The trained cursor of a checkpoint of ours. `ResumeError` when it is missing or torn."""
    return _read(Path(directory) / DATA, dict[str, Any])


def read_probe(directory: str | os.PathLike[str]) -> Probe | None:
    """What the gang computed when it saved; None where that was not stored. `ResumeError` when it is not whole."""
    path = Path(directory) / PROBE
    return _read(path, Probe) if path.exists() else None


def classify(directory: Path, iteration: int | None = None) -> Marker | Incomplete | Literal["megatron", "foreign"]:
    """Whose checkpoint a directory is: of ours its marker. `iteration` of the directory, where it is one: its marker
    must be about it."""
    if not directory.is_dir():
        return "foreign"
    if (directory / MARKER).exists():
        return _believed(directory, iteration)
    if (directory / INCOMPLETE).exists():
        return Incomplete(None, directory.name, "the save was cut off")
    if ours := [name for name in (DATA, PROBE) if (directory / name).exists()]:
        return Incomplete(None, directory.name, f"{MARKER} is missing beside {' and '.join(ours)}")
    if all(entry.name.startswith(".") for entry in directory.iterdir()):
        return Incomplete(None, directory.name, "empty")
    return "megatron" if _is_object(directory / _MEGATRON_METADATA) else "foreign"


def _believed(directory: Path, iteration: int | None) -> Marker | Incomplete:
    """The marker, or why it cannot be believed."""
    try:
        marker = parse(Marker, (directory / MARKER).read_bytes())
    except OSError as error:
        return Incomplete(None, directory.name, f"{MARKER} cannot be read: {error.strerror}")
    except Malformed as error:
        return Incomplete(None, directory.name, f"{MARKER} {error}")
    if iteration is not None and marker.iteration != iteration:
        about = "no iteration" if marker.iteration is None else f"iteration {marker.iteration}"
        return Incomplete(None, directory.name, f"{MARKER} is about {about}, and stands in {directory.name}")
    return marker


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
