"""Backing copies of slots, and how bytes move between them and the live model.

The live tensors have a *home*: the storages they were created in. A slot is brought in one of two ways, by its tier:

    copy     its bytes rest in host memory and are copied into the home (and the primary's back afterwards)
    device   its bytes rest in storages of their own; the live tensors are pointed at them, and nothing moves

The store moves bytes and knows what is where; whether a move is allowed is the machine's to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from state.digest import Piece, digest_pieces
from state.digest_records import ShardDigest
from state.errors import InvariantViolation
from state.finite import not_finite
from state.slots import Slot, Tier

# A block starts at a multiple of this many bytes, so that every dtype has whole offsets in a copy of it.
_ALIGNMENT = 16
_COMPARED_AT_ONCE = 1 << 26


class NotHeld(InvariantViolation):
    """A slot, or a version of it, was asked for whose bytes this worker does not hold."""


class LiveWeights(Protocol):
    """The tensors that the model computes with, as the worker's model defines them."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All local parameters and persistent buffers by local name: the objects the model uses, not copies."""

    def pieces(self) -> Iterable[Piece]:
        """The named (Hugging Face) tensors that stand here, as views of current memory, computed at each call."""


@dataclass(frozen=True, slots=True)
class Key:
    """One set of bytes: a slot, and for the old_actor ring which of its versions."""

    slot: Slot
    version: int | None = None

    def __str__(self) -> str:
        return self.slot if self.version is None else f"{self.slot}@{self.version}"


@dataclass(frozen=True, slots=True)
class _Block:
    """The used range of one home storage, as bytes from `start` on, with the live tensors that stand in it.

    `storage_bytes` is the size of the whole storage: others (an optimizer's buffers) may view bytes behind the range.
    """

    home: Tensor
    names: tuple[str, ...]
    start: int
    storage_bytes: int


class SlotStore:
    """Holds the bytes of every slot of one worker. `tiers` names the slots there are, the primary among them.

    Live tensors that share a storage are moved together, one copy per storage; bytes between them are padding.
    """

    def __init__(self, live: LiveWeights, tiers: Mapping[Slot, Tier]) -> None:
        self._live = live
        self._tiers = dict(tiers)
        self._homes = {name: tensor.data for name, tensor in live.tensors().items()}
        self._blocks = _blocks(self._homes)
        self._backing: dict[Key, list[Tensor]] = {}
        self._at_home: Key | None = None
        self._pointed: Key | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._tiers)

    def tier(self, slot: Slot) -> Tier:
        if slot not in self._tiers:
            have = ", ".join(self._tiers)
            raise NotHeld(f"this worker has no slot {slot}; it has {have}")
        return self._tiers[slot]

    def holds(self, key: Key) -> bool:
        """Whether the bytes of `key` rest somewhere other than (only) in the home."""
        return key in self._backing

    def is_at_home(self, key: Key) -> bool:
        """Whether the home holds `key` and every live tensor stands there."""
        return self._at_home == key and self._pointed is None

    def digest(self) -> ShardDigest:
        """Hash the live bytes."""
        return digest_pieces(self._live.pieces())

    def not_finite(self) -> tuple[str, ...]:
        """Names of tensors whose live bytes hold a value that is not finite."""
        return not_finite(self._live.pieces())

    @contextmanager
    def reading(self, key: Key) -> Iterator[None]:
        """Inside, the live tensors are views of the bytes of `key` where they rest, for readers. Nothing moves."""
        self._must_hold(key)
        if self._pointed is not None:
            raise NotHeld(f"the live tensors point at {self._pointed}; {key} cannot be read beside it")
        try:
            self._point_at(key)
            yield
        finally:
            self._point_home()

    def begin_fill(self, key: Key, home: Key) -> None:
        """Make the live tensors the place where a loader may write `key`; the bytes of `home` must survive it."""
        if self.tier(key.slot) is Tier.DEVICE and key != home:
            if not self.holds(key):  # starts as the home stands, as in the other tier: not every loader fills buffers
                self._backing[key] = [block.home.clone() for block in self._blocks]
            self._point_at(key)
            return
        self._point_home()
        if self._at_home == home and key != home and not self.holds(home):
            self.keep(home)
        self._at_home = None

    def end_fill(self, key: Key, home: Key) -> None:
        """The loader is done: the live bytes are `key`."""
        if self._pointed == key:
            return
        self._at_home = key
        if key == home:
            self.forget(home)
        else:
            self.keep(key)

    def keep(self, key: Key) -> None:
        """Take a backing copy of the home, which must hold `key`."""
        self._must_be_home(key)
        held = self._backing.get(key)
        if held is None:
            held = [torch.empty(b.home.shape, dtype=torch.uint8, pin_memory=b.home.is_cuda) for b in self._blocks]
        for resting, block in zip(held, self._blocks, strict=True):
            resting.copy_(block.home)
        self._backing[key] = held

    def forget(self, key: Key) -> None:
        """Drop the backing copy of `key`: its live bytes have changed, or it left the ring."""
        self._backing.pop(key, None)

    def snapshot(self, source: Key, key: Key) -> None:
        """Fill `key` from the home, which must hold `source`; live bytes stay as they are."""
        self._must_be_home(source)
        if self.tier(key.slot) is Tier.DEVICE:
            self._backing[key] = [block.home.clone() for block in self._blocks]
        else:
            self._backing[key] = [block.home.cpu().clone() for block in self._blocks]

    def bring(self, key: Key, home: Key) -> bool:
        """Make the live model compute with `key`. True if bytes moved (False: pointers, or nothing to do).

        `home` is the slot whose only bytes may be those in the home; they are kept before being overwritten.
        An error part way leaves the home unknown: `is_at_home` is then false for every key.
        """
        if self._at_home == key:
            self._point_home()
            return False
        self._must_hold(key)
        if self.tier(key.slot) is Tier.DEVICE and key != home:
            self._point_at(key)
            return False
        self._point_home()
        if self._at_home == home and not self.holds(home):
            self.keep(home)
        self._at_home = None
        for block, held in zip(self._blocks, self._backing[key], strict=True):
            block.home.copy_(held, non_blocking=True)
        if any(block.home.is_cuda for block in self._blocks):
            torch.cuda.synchronize()
        self._at_home = key
        return True

    def release(self, key: Key) -> None:
        """Free the home, which holds `key` and must have an equal backing copy."""
        self._must_be_home(key)
        if not self.holds(key):
            self.keep(key)
        for block, held in zip(self._blocks, self._backing[key], strict=True):
            if not _equal(block.home, held):
                raise InvariantViolation(f"the backing copy of {key} differs from its live bytes; nothing was released")
        self._at_home = None
        for block in self._blocks:
            block.home.untyped_storage().resize_(0)
        give_back()

    def reclaim(self) -> None:
        """Allocate the home again where it was freed; its bytes are undefined until a slot is brought."""
        for block in self._blocks:
            storage = block.home.untyped_storage()
            if storage.nbytes() != block.storage_bytes:
                storage.resize_(block.storage_bytes)

    def _must_hold(self, key: Key) -> None:
        if not self.holds(key):
            have = ", ".join(sorted(str(k) for k in self._backing)) or "nothing"
            raise NotHeld(f"no bytes of {key} are held here to restore it from; held: {have}")

    def _must_be_home(self, key: Key) -> None:
        if self._at_home != key or self._pointed is not None:
            raise NotHeld(f"the live home holds {self._at_home or 'nothing known'}, not {key}")

    def _point_home(self) -> None:
        if self._pointed is not None:
            for name, tensor in self._live.tensors().items():
                tensor.data = self._homes[name]
            self._pointed = None

    def _point_at(self, key: Key) -> None:
        tensors = self._live.tensors()
        self._pointed = key  # before the first pointer moves: an error part way must not look like home
        for block, held in zip(self._blocks, self._backing[key], strict=True):
            storage = held.untyped_storage()
            for name in block.names:
                home = self._homes[name]
                offset = home.storage_offset() - block.start // home.element_size()
                view = torch.empty(0, dtype=home.dtype, device=held.device)
                tensors[name].data = view.set_(storage, offset, home.shape, home.stride())


def give_back() -> None:
    """Give memory that nothing uses any more back to the device, where other processes can have it.

    PyTorch keeps what was freed for itself: until this, a sleeping trainer leaves an engine on its GPU not one byte.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _equal(home: Tensor, held: Tensor) -> bool:
    """Compared where the home is, a part at a time: all of `held` beside it might not fit."""
    parts = zip(torch.split(home, _COMPARED_AT_ONCE), torch.split(held, _COMPARED_AT_ONCE), strict=True)
    return all(torch.equal(ours, theirs.to(ours.device, non_blocking=True)) for ours, theirs in parts)


def _blocks(homes: Mapping[str, Tensor]) -> list[_Block]:
    by_storage: dict[int, list[str]] = {}
    for name, tensor in homes.items():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [_block(homes, names) for names in by_storage.values()]


def _block(homes: Mapping[str, Tensor], names: list[str]) -> _Block:
    first = homes[names[0]]
    starts = [int(homes[n].storage_offset()) * homes[n].element_size() for n in names]
    ends = [s + _extent(homes[n]) for s, n in zip(starts, names, strict=True)]
    start = min(starts) // _ALIGNMENT * _ALIGNMENT
    view = torch.empty(0, dtype=torch.uint8, device=first.device)
    home = view.set_(first.untyped_storage(), start, (max(ends) - start,), (1,))
    return _Block(home, tuple(names), start, first.untyped_storage().nbytes())


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to behind the last element of a strided tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
