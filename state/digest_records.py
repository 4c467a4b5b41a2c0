"""Fingerprints as values: what is sworn to, compared, sent and written down.

Without torch, which whoever only decides need not load. How they are computed from weights: `state.digest`.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a full tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dimension."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.full_shape) == len(self.offset) == len(self.shape):
            raise ValueError(f"region has mixed ranks: {self}")
        for full, start, size in zip(self.full_shape, self.offset, self.shape, strict=True):
            if start < 0 or size < 0 or start + size > full:
                raise ValueError(f"region does not fit its tensor: {self}")

    @staticmethod
    def whole(shape: Iterable[int]) -> Region:
        full = tuple(shape)
        return Region(full, (0,) * len(full), full)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PieceDigest:
    """The fingerprint of one piece."""

    name: str
    dtype: str
    region: Region
    value: int


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The fingerprint of a whole named tensor. `dtype` in torch's words: `float32`, `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: int


class ShardDigest:
    """The fingerprint of everything that one rank holds of one slot.

    It travels packed, and `pieces` are made where somebody looks at them: of a thousand replicas a driver looks at one.
    """

    __slots__ = ("_packed", "_pieces", "summary")

    def __init__(self, pieces: tuple[PieceDigest, ...], summary: str) -> None:
        self._pieces: tuple[PieceDigest, ...] | None = pieces
        self._packed: bytes | None = None
        self.summary = summary

    @staticmethod
    def of(pieces: Iterable[PieceDigest]) -> ShardDigest:
        ordered = tuple(sorted(pieces, key=by_place))
        return ShardDigest(ordered, summarise(f"{about(p.name, p.dtype, p.region)} {p.value:016x}" for p in ordered))

    @property
    def pieces(self) -> tuple[PieceDigest, ...]:
        """Sorted by name and place."""
        if self._pieces is None:
            assert self._packed is not None
            self._pieces = tuple(
                PieceDigest(name, dtype, _region(full, offset, shape), value)
                for name, dtype, full, offset, shape, value in pickle.loads(self._packed)
            )
        return self._pieces

    def differing(self, other: ShardDigest) -> tuple[str, ...]:
        """Names of tensors of which the two have other pieces, sorted."""
        if self.summary == other.summary:
            return ()
        return tuple(sorted({piece.name for piece in {*self.pieces} ^ {*other.pieces}}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardDigest) and self.summary == other.summary and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash(self.summary)

    def __repr__(self) -> str:
        return f"ShardDigest({self.summary})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._packed is None:
            plain = [
                (p.name, p.dtype, p.region.full_shape, p.region.offset, p.region.shape, p.value) for p in self.pieces
            ]
            self._packed = pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)
        return _still_packed, (self._packed, self.summary)


class Placed(Protocol):
    """Anything that stands somewhere in a named tensor."""

    @property
    def name(self) -> str: ...

    @property
    def region(self) -> Region: ...


def by_place(piece: Placed) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The order of the pieces of a rank."""
    return piece.name, piece.region.offset, piece.region.shape


def about(name: str, dtype: str, region: Region) -> str:
    """All of a piece but its value, as a summary has it."""
    return f"{name} {dtype} {region.full_shape} {region.offset} {region.shape}"


@lru_cache(maxsize=1 << 14)
def _region(full_shape: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Region:
    """The layers of a model are cut alike: most regions were met before."""
    return Region(full_shape, offset, shape)


def _still_packed(packed: bytes, summary: str) -> ShardDigest:
    shard = ShardDigest((), summary)
    shard._packed, shard._pieces = packed, None
    return shard


def summarise(lines: Iterable[str]) -> str:
    """16 hex digits for people to compare: SHA-256 of the lines, shortened."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
