"""Fingerprints of weights that add up over shards.

The digest of a named tensor is the sum, mod 2^64, over its elements of

    (raw bits of the element, unsigned, of its width) x mix(index of the element in the full tensor)

where `mix` is an odd-valued 64-bit mixer (the finalizer of splitmix64, with its lowest bit set). A sum over global
positions composes: every rank hashes its own slices where they stand, and the digests of disjoint slices that
cover a tensor add up to the digest of the whole, before anything was gathered or converted.

Only torch is imported, so that this file also runs inside an engine's process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25
"""Elements hashed at once: what a CPU's caches hold with all temporaries, and what keeps a GPU busy."""
_RAW_BITS = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, -1)}


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
class Piece:
    """The part of a named (Hugging Face) tensor that stands in local memory.

    `tensor` is a view of live memory whose shape is `region.shape`; it need not be contiguous. Writing to it fills
    the weights, hashing it fingerprints them, sending it publishes them.
    """

    name: str
    region: Region
    tensor: Tensor


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


@dataclass(frozen=True, slots=True)
class ShardDigest:
    """The fingerprint of everything that one rank holds of one slot."""

    pieces: tuple[PieceDigest, ...]
    summary: str

    @staticmethod
    def of(pieces: Iterable[PieceDigest]) -> ShardDigest:
        ordered = tuple(sorted(pieces, key=lambda p: (p.name, p.region.offset, p.region.shape)))
        return ShardDigest(ordered, summarise(f"{p.name} {p.dtype} {p.region} {p.value:016x}" for p in ordered))


def summarise(lines: Iterable[str]) -> str:
    """16 hex digits for people to compare: SHA-256 of the lines, shortened."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(index: Tensor) -> Tensor:
    """Odd-valued 64-bit mixer of an int64 tensor of indices; wraps mod 2^64. Reference: splitmix64's finalizer."""
    z = index + _signed(0x9E3779B97F4A7C15)  # a tensor of our own: from here on in place, for the caches' sake
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift_right(z, 31)).bitwise_or_(1)


def raw_bits(tensor: Tensor) -> Tensor:
    """The bits of each element as a non-negative integer of its width, in int64 (8-byte elements wrap)."""
    if tensor.is_complex():
        raise TypeError("complex tensors have no digest")
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int64)
    view, mask = _RAW_BITS[tensor.element_size()]
    return tensor.contiguous().view(view).to(torch.int64) & mask


def digest_region(tensor: Tensor, region: Region) -> int:
    """The contribution of `tensor`, which is `region` of a full tensor, to that tensor's digest; in [0, 2^64)."""
    return int(_weighted_sum(tensor, region).item()) & MASK64


def _weighted_sum(tensor: Tensor, region: Region) -> Tensor:
    """The same as an int64 scalar that stays on the tensor's device: nothing waits for it."""
    if tuple(tensor.shape) != region.shape:
        raise ValueError(f"tensor of shape {tuple(tensor.shape)} is not {region}")
    tensor, device = tensor.detach(), tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if region.numel == 0:
        return total
    if not region.shape:
        return total + (raw_bits(tensor.reshape(1)) * mix(torch.zeros(1, dtype=torch.int64, device=device))).sum()
    strides = [math.prod(region.full_shape[d + 1 :]) for d in range(len(region.full_shape))]
    row = math.prod(region.shape[1:])
    inner = torch.zeros((), dtype=torch.int64, device=device)
    for dim in range(1, len(region.shape)):
        inner = inner.unsqueeze(-1) + _positions(region, dim, strides[dim], device)
    inner = inner.reshape(1, row)
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    rows_at_once = max(1, chunk // max(1, row))
    outer = _positions(region, 0, strides[0], device).unsqueeze(-1)
    for start in range(0, region.shape[0], rows_at_once):
        rows = tensor[start : start + rows_at_once].reshape(-1, row)
        total += mix(outer[start : start + rows_at_once] + inner).mul_(raw_bits(rows)).sum()
    return total


def _positions(region: Region, dim: int, stride: int, device: torch.device) -> Tensor:
    start, size = region.offset[dim], region.shape[dim]
    return torch.arange(start, start + size, dtype=torch.int64, device=device) * stride


def digest_pieces(pieces: Iterable[Piece]) -> ShardDigest:
    """Hash every piece where it stands."""
    held = list(pieces)
    sums = [_weighted_sum(piece.tensor, piece.region) for piece in held]
    # One wait for the device, not one for each piece.
    values = torch.stack(sums).tolist() if sums else []
    return ShardDigest.of(
        PieceDigest(piece.name, dtype_name(piece.tensor.dtype), piece.region, value & MASK64)
        for piece, value in zip(held, values, strict=True)
    )


def digest_tensor(name: str, tensor: Tensor) -> TensorDigest:
    """The digest of a whole tensor that stands here in one piece."""
    shape = tuple(tensor.shape)
    return TensorDigest(name, dtype_name(tensor.dtype), shape, digest_region(tensor, Region.whole(shape)))
