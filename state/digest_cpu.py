"""Digests on a CPU as one compiled loop (numba), at about the speed at which memory can be copied.

Compiled once for each width of elements, and kept on disk beside this file or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from state.digest_records import MASK64, Region
from state.mixing import RUN, RUN_BITS, within_run
from state.rows import Rows, rows_of

_MASK = RUN - 1
_SHARE = 1 << 22
_RAW_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(nogil=True)(function)


@_compiled
def _splitmix(x):  # type: ignore[no-untyped-def]
    z = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@_compiled
def _weigh(memory, low, start, height, length, step, stride, origin, origin_step):  # type: ignore[no-untyped-def]
    """The sum over one `Rows` of `memory`, an array of raw bits; what follows it are the fields of `Rows`."""
    total = np.uint64(0)
    for row in range(height):
        place = start + row * step
        at = origin + row * origin_step
        end = at + length
        while at < end:
            first = at & _MASK
            width = min(RUN - first, end - at)
            weights = low[first : first + width]
            within = np.uint64(0)
            if stride == 1:  # on its own, for the compiler to make vectors of it
                bits = memory[place : place + width]
                for i in range(width):
                    within += np.uint64(bits[i]) * weights[i]
            else:
                for i in range(width):
                    within += np.uint64(memory[place + i * stride]) * weights[i]
            total += within * _splitmix(at >> RUN_BITS)
            place += width * stride
            at += width
    return total


def sums(held: Sequence[tuple[Tensor, Region]]) -> Tensor:
    """As `state.digest.eager_sums`, for tensors in host memory. Uses as many threads as torch would."""
    low = within_run(torch.device("cpu")).numpy().view(np.uint64)
    work = [
        (number, memory, share)
        for number, (tensor, region) in enumerate(held)
        for memory in (_memory(tensor),)
        for rows in rows_of(tensor, region.full_shape, region.offset, region.shape)
        for share in _shares(rows)
    ]
    found = [0] * len(held)
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="digest") as threads:
        for (number, _, _), value in zip(work, threads.map(lambda w: _weigh(w[1], low, *w[2]), work), strict=True):
            found[number] += int(value)
    return torch.from_numpy(np.array([value & MASK64 for value in found], dtype=np.uint64).view(np.int64))


def _shares(rows: Rows) -> Iterator[Rows]:
    """The same rows in parts of about `_SHARE` elements, for one thread each."""
    if rows.height == 1:
        for begin in range(0, rows.length, _SHARE):
            start, origin = rows.start + begin * rows.stride, rows.origin + begin
            yield rows._replace(start=start, length=min(_SHARE, rows.length - begin), origin=origin)
        return
    at_once = max(1, _SHARE // rows.length)
    for first in range(0, rows.height, at_once):
        start, origin = rows.start + first * rows.step, rows.origin + first * rows.origin_step
        yield rows._replace(start=start, height=min(at_once, rows.height - first), origin=origin)


def _memory(tensor: Tensor) -> np.ndarray:
    """The raw bits of all elements from the first to the last of a strided tensor, with what stands between them."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    bits = tensor.detach().view(_RAW_BITS[tensor.element_size()])
    return bits.as_strided((reach if tensor.numel() else 0,), (1,)).numpy()
