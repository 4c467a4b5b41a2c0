"""A bucket as tensors: what its plan makes of a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.weights.buckets import Bucket, TensorSpec, itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`. `ValueError` for one that is not moved."""
    itemsize(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor of the bucket as a view of `buffer` (uint8, one dimension, at least `bucket.nbytes` long)."""
    for entry in bucket.entries:
        flat = buffer[entry.offset : entry.offset + entry.tensor.nbytes]
        yield entry.tensor, flat.view(torch_dtype(entry.tensor.dtype)).view(entry.tensor.shape)
