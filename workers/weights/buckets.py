"""Named tensors packed into flat buffers, one right after the other.

A bucket is a plan: which tensor stands at which byte. Both sides of a transfer compute their views from it, so that
nothing but bytes has to travel. Servers that know only names, dtypes and shapes arrive at the same bytes.
Without torch: whoever plans a publish needs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element of every dtype that is moved, in torch's words."""


def itemsize(dtype: str) -> int:
    """Bytes of an element. `ValueError` for a dtype that is not moved."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"no transport for dtype {dtype}; there is one for {', '.join(sorted(ITEMSIZE))}")
    return ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to move: Hugging Face name, dtype in torch's words, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor and the byte of its bucket at which it starts."""

    tensor: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    entries: tuple[Entry, ...]
    nbytes: int


def pack(tensors: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fills buckets of at most `bucket_bytes` in the given order. A tensor that is bigger goes alone. Pure.

    A view of a buffer must start at a multiple of its element size: a tensor that would not begins a bucket.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    end = 0
    for tensor in tensors:
        is_aligned = end % itemsize(tensor.dtype) == 0
        if entries and (end + tensor.nbytes > bucket_bytes or not is_aligned):
            buckets.append(Bucket(tuple(entries), end))
            entries, end = [], 0
        entries.append(Entry(tensor, end))
        end += tensor.nbytes
    if entries:
        buckets.append(Bucket(tuple(entries), end))
    return tuple(buckets)
