"""Named tensors packed into flat buffers, one right after the other.

A bucket is a plan: which tensor stands at which byte. Both sides of a transfer compute their views from it, so that
nothing but bytes has to travel. Servers that know only names, dtypes and shapes arrive at the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from state.digest import dtype_name

_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that `digest.dtype_name` calls `name`."""
    if name not in _DTYPES:
        raise ValueError(f"no transport for dtype {name}; there is one for {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to move: Hugging Face name, dtype in torch's words, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


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
        is_aligned = end % torch_dtype(tensor.dtype).itemsize == 0
        if entries and (end + tensor.nbytes > bucket_bytes or not is_aligned):
            buckets.append(Bucket(tuple(entries), end))
            entries, end = [], 0
        entries.append(Entry(tensor, end))
        end += tensor.nbytes
    if entries:
        buckets.append(Bucket(tuple(entries), end))
    return tuple(buckets)


def views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor of the bucket as a view of `buffer` (uint8, one dimension, at least `bucket.nbytes` long)."""
    for entry in bucket.entries:
        flat = buffer[entry.offset : entry.offset + entry.tensor.nbytes]
        yield entry.tensor, flat.view(torch_dtype(entry.tensor.dtype)).view(entry.tensor.shape)
