"""A bucket as tensors: what its plan makes of a flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.weights.buckets import ITEMSIZE, Bucket, TensorSpec

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`. `ValueError` for one that is not moved."""
    if name not in _DTYPES:
        raise ValueError(f"no transport for dtype {name}; there is one for {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


def views(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor of the bucket as a view of `buffer` (uint8, one dimension, at least `bucket.nbytes` long)."""
    for entry in bucket.entries:
        flat = buffer[entry.offset : entry.offset + entry.tensor.nbytes]
        yield entry.tensor, flat.view(torch_dtype(entry.tensor.dtype)).view(entry.tensor.shape)
