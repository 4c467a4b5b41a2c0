"""Digests on a GPU as one fused kernel (Triton) over a table of rows, at the speed at which memory can be read.

The table has a line for each `Rows`: where it stands and which elements of its tensor it holds. The windows of a line
are the runs of the mixer that its rows touch; a program takes some consecutive windows of one line, and adds what it
found to the sum of the part that the line belongs to. Integer sums do not depend on the order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from state.digest import Region
from state.mixing import RUN, RUN_BITS, within_run
from state.rows import Rows, rows_of

_WINDOWS, _AHEAD, _WARPS = 64, 2, 2
"""Of a program: windows, how many of them in one turn of its loop, and warps. On an H200 this reads 85 to 88 % of what
a copy moves there; of a bfloat16 tensor four windows by one warp read 1 % more, of a float32 one 6 % less."""
_AT_ONCE = 128
"""Parts in one launch: the kernel runs while the table of the next parts is made."""
_VECTOR = 16
"""Bytes that a thread reads at once where all rows are aligned to them, in memory and in the tensor."""
_FIELDS = 10
_KINDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _splitmix(x):  # type: ignore[no-untyped-def]
    z = x.to(tl.uint64) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64)


@triton.jit(do_not_specialize=["lines", "halvings"])
def _weigh(  # type: ignore[no-untyped-def]
    table,
    ends,
    low,
    sums,
    lines,
    halvings,
    FIELDS: tl.constexpr,
    RUN_BITS: tl.constexpr,
    WINDOWS: tl.constexpr,
    AHEAD: tl.constexpr,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """`ends[line]`: the number of programs up to and with that line. A thread reads VECTOR elements of KIND at once."""
    RUN: tl.constexpr = 1 << RUN_BITS
    WIDTH: tl.constexpr = KIND.primitive_bitwidth // 8
    program = tl.program_id(0)
    line = 0
    above = lines
    for _ in range(halvings):
        middle = (line + above) // 2
        later = tl.load(ends + middle) <= program
        line = tl.where(later, middle + 1, line)
        above = tl.where(later, above, middle)
    fields = table + line * FIELDS
    address = tl.load(fields)
    length = tl.load(fields + 1)
    step = tl.load(fields + 2)
    stride = tl.load(fields + 3)
    origin = tl.load(fields + 4)
    origin_step = tl.load(fields + 5)
    in_a_row = tl.load(fields + 6)
    last = tl.load(fields + 7)
    begin = tl.load(fields + 8)
    part = tl.load(fields + 9)
    first = (program - begin) * WINDOWS
    last = tl.minimum(first + WINDOWS, last)
    row = first // in_a_row
    window = first - row * in_a_row
    vectors = (tl.arange(0, RUN // VECTOR) * VECTOR)[:, None]
    lanes = vectors + tl.arange(0, VECTOR)[None, :]
    weights = tl.load(low + lanes)
    total = tl.zeros([RUN // VECTOR], tl.int64)
    for at in range(first, last, AHEAD):
        for ahead in tl.static_range(AHEAD):
            start = origin + row * origin_step
            high = (start >> RUN_BITS) + window
            behind = (high << RUN_BITS) - start  # elements of the row before this window, negative: room before it
            inside = (vectors >= -behind) & (vectors < length - behind) & (at + ahead < last)
            place = (address + (row * step + behind * stride) * WIDTH).to(tl.pointer_type(KIND))
            place = tl.multiple_of(place, 16) + lanes if VECTOR > 1 else place + lanes * stride
            bits = tl.load(place, mask=inside, other=0).to(tl.int64)
            total += tl.sum(bits * weights, axis=1) * _splitmix(high)
            window += 1
            row = tl.where(window == in_a_row, row + 1, row)
            window = tl.where(window == in_a_row, 0, window)
    tl.atomic_add(sums + part, tl.sum(total, axis=0))


class _Table:
    """Lines for one launch, whose elements are all of one width and can, or cannot, be read as vectors."""

    def __init__(self) -> None:
        self.fields, self.ends, self.programs = array("q"), array("q"), 0

    def add(self, part: int, address: int, rows: Rows) -> None:
        _, height, length, step, stride, origin, origin_step = rows
        # Rows that begin at different positions of their runs are given as many windows as any may touch.
        into = origin % RUN if origin_step % RUN == 0 else RUN - 1
        in_a_row = (into + length - 1) // RUN + 1
        windows = height * in_a_row
        self.fields.extend((address, length, step, stride, origin, origin_step, in_a_row, windows, self.programs, part))
        self.programs += -(-windows // _WINDOWS)
        self.ends.append(self.programs)

    def launch(self, width: int, vector: int, low: Tensor, sums: Tensor) -> None:
        table, ends = (_to_device(numbers, sums.device) for numbers in (self.fields, self.ends))
        lines = len(self.ends)
        _weigh[(self.programs,)](
            table,
            ends,
            low,
            sums,
            lines,
            lines.bit_length(),
            FIELDS=_FIELDS,
            RUN_BITS=RUN_BITS,
            WINDOWS=_WINDOWS,
            AHEAD=_AHEAD,
            KIND=_KINDS[width],
            VECTOR=vector,
            num_warps=_WARPS,
        )


def sums(held: Sequence[tuple[Tensor, Region]]) -> list[int]:
    """As `state.digest.eager_sums`, for tensors on one GPU. Waits for that GPU once, at the end."""
    device = held[0][0].device
    with torch.cuda.device(device):
        low = within_run(device)
        totals = torch.zeros(len(held), dtype=torch.int64, device=device)
        for first in range(0, len(held), _AT_ONCE):
            for (width, vector), table in _tables(held[first : first + _AT_ONCE], first).items():
                table.launch(width, vector, low, totals)
        return totals.tolist()


def _tables(held: Sequence[tuple[Tensor, Region]], number: int) -> dict[tuple[int, int], _Table]:
    """By width in bytes, and elements read at once. The parts are numbered from `number` on."""
    tables: dict[tuple[int, int], _Table] = {}
    for part, (tensor, region) in enumerate(held, number):
        width = tensor.element_size()
        for rows in rows_of(tensor, region.full_shape, region.offset, region.shape):
            address = tensor.data_ptr() + rows.start * width
            sizes = (rows.length | rows.step | rows.origin | rows.origin_step) * width
            aligned = rows.stride == 1 and (address | sizes) % _VECTOR == 0
            kind = (width, _VECTOR // width if aligned else 1)
            table = tables.get(kind)
            if table is None:
                table = tables[kind] = _Table()
            table.add(part, address, rows)
    return tables


def _to_device(numbers: array[int], device: torch.device) -> Tensor:
    """int64. From pinned memory, so that nothing waits for the kernels before it."""
    return torch.frombuffer(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
