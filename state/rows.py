"""How a box of a named tensor stands in memory: as rows whose elements follow each other in the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from state.mixing import RUN


class Rows(NamedTuple):
    """`height` rows of `length` elements.

    Element `i` of row `r` is number `origin + r * origin_step + i` of the full tensor, and stands
    `start + r * step + i * stride` elements behind the first of the view.
    """

    start: int
    height: int
    length: int
    step: int
    stride: int
    origin: int
    origin_step: int


class Block(NamedTuple):
    """`height` rows of `width` elements, each within one run of the mixer: row `r` in run `high + r * high_step`, from
    its position `low` on. Memory as in `Rows`."""

    start: int
    height: int
    width: int
    step: int
    stride: int
    high: int
    high_step: int
    low: int


def rows_of(tensor: Tensor, full: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> list[Rows]:
    """Of a view that is the box `offset`, `shape` of a tensor of shape `full`."""
    if 0 in shape:
        return []
    if shape and shape[1:] == full[1:] and tensor.is_contiguous():  # the usual one, quickly: there are thousands
        numel = tensor.numel()
        return [Rows(0, 1, numel, 0, 1, offset[0] * (numel // shape[0]), 0)]
    dims: list[list[int]] = []  # innermost first: size, elements of memory and of the tensor to the next
    origin, unit = 0, 1
    for full_size, start, size, stride in zip(
        reversed(full), reversed(offset), reversed(shape), reversed(tensor.stride()), strict=True
    ):
        origin += start * unit
        if size > 1:
            if dims and stride == dims[-1][0] * dims[-1][1] and unit == dims[-1][0] * dims[-1][2]:
                dims[-1][0] *= size
            else:
                dims.append([size, stride, unit])
        unit *= full_size
    if not dims or dims[0][2] != 1:  # neighbours in memory are none in the tensor
        dims.insert(0, [1, 1, 1])
    (length, stride, _), *outer = dims
    outer.sort(reverse=True)
    height, step, origin_step = outer[0] if outer else (1, 0, 0)
    return [
        Rows(
            sum(at * dim[1] for at, dim in zip(position, outer[1:], strict=True)),
            height,
            length,
            step,
            stride,
            origin + sum(at * dim[2] for at, dim in zip(position, outer[1:], strict=True)),
            origin_step,
        )
        for position in itertools.product(*(range(dim[0]) for dim in outer[1:]))
    ]


def blocks(rows: Rows) -> Iterator[Block]:
    """The same rows, cut where runs of the mixer end, few blocks rather than many."""
    if rows.height == 1:
        head = min(rows.length, -rows.origin % RUN)
        body = (rows.length - head) // RUN
        for begin, height, width in (
            (0, 1, head),
            (head, body, RUN),
            (head + body * RUN, 1, rows.length - head - body * RUN),
        ):
            if height * width:
                high, low = divmod(rows.origin + begin, RUN)
                place = rows.start + begin * rows.stride
                yield Block(place, height, width, RUN * rows.stride, rows.stride, high, 1, low)
        return
    # Every `apart`-th row begins at the same position of a run.
    apart = RUN // math.gcd(rows.origin_step, RUN)
    step, high_step = rows.step * apart, rows.origin_step * apart // RUN
    for first in range(min(apart, rows.height)):
        height = len(range(first, rows.height, apart))
        start, origin = rows.start + first * rows.step, rows.origin + first * rows.origin_step
        begin = 0
        while begin < rows.length:
            high, low = divmod(origin + begin, RUN)
            width = min(rows.length - begin, RUN - low)
            place = start + begin * rows.stride
            yield Block(place, height, width, step, rows.stride, high, high_step, low)
            begin += width
