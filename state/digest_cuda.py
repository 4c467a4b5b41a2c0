"""Digests on a GPU as one fused kernel (Triton) over a table of rows, at the speed at which memory can be read.

The table has a line for each `Rows`: where it stands and which elements of its tensor it holds. The windows of a line
are the runs of the mixer that its rows touch; a program takes some consecutive windows of one line, and adds what it
found to the sum of the part that the line belongs to. Integer sums do not depend on the order.

Fields of a line: number of programs up to its end, and before it; its windows, and those of one row; where its first
element stands, then `length`, `step`, `stride`, `origin` and `origin_step` of its `Rows`; the part.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from state.digest_records import Region
from state.mixing import RUN, RUN_BITS, within_run
from state.rows import rows_of

_WINDOWS, _AHEAD, _WARPS = 64, 2, 2
"""Of a program: windows, how many of them in one turn of its loop, and warps. On an H200 this reads 85 to 88 % of what
a copy moves there; of a bfloat16 tensor four windows by one warp read 1 % more, of a float32 one 6 % less."""
_AT_ONCE = 128
"""Parts in one launch: the kernel runs while the table of the next parts is made."""
_VECTOR = 16
"""Bytes that a thread reads at once where all rows are aligned to them, in memory and in the tensor."""
_FIELDS = 11
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
    """A thread reads VECTOR elements of KIND at once."""
    RUN: tl.constexpr = 1 << RUN_BITS
    WIDTH: tl.constexpr = KIND.primitive_bitwidth // 8
    program = tl.program_id(0)
    line = 0
    above = lines
    for _ in range(halvings):
        middle = (line + above) // 2
        later = tl.load(table + middle * FIELDS) <= program
        line = tl.where(later, middle + 1, line)
        above = tl.where(later, above, middle)
    fields = table + line * FIELDS
    begin = tl.load(fields + 1)
    windows = tl.load(fields + 2)
    in_a_row = tl.load(fields + 3)
    address = tl.load(fields + 4)
    length = tl.load(fields + 5)
    step = tl.load(fields + 6)
    stride = tl.load(fields + 7)
    origin = tl.load(fields + 8)
    origin_step = tl.load(fields + 9)
    part = tl.load(fields + 10)
    first = (program - begin) * WINDOWS
    last = tl.minimum(first + WINDOWS, windows)
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


def sums(held: Sequence[tuple[Tensor, Region]]) -> Tensor:
    """As `state.digest.eager_sums`, for tensors on one GPU, which must stay until somebody has waited for the sums."""
    device = held[0][0].device
    with torch.cuda.device(device):
        low = within_run(device)
        totals = torch.zeros(len(held), dtype=torch.int64, device=device)
        for first in range(0, len(held), _AT_ONCE):
            for (width, vector), stand in _standing(held[first : first + _AT_ONCE], first).items():
                table, programs = _table(stand)
                lines = len(table)
                _weigh[(programs,)](
                    # From pinned memory, so that nothing waits for the kernels before it.
                    table.pin_memory().to(device, non_blocking=True),
                    low,
                    totals,
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
        return totals


def _standing(held: Sequence[tuple[Tensor, Region]], number: int) -> dict[tuple[int, int], array[int]]:
    """By width in bytes and elements read at once: for each `Rows` its height, the fields 4 to 9 of its line, and the
    number of its part; the first part is number `number`."""
    stand: dict[tuple[int, int], array[int]] = defaultdict(lambda: array("q"))
    for part, (tensor, region) in enumerate(held, number):
        width, first = tensor.element_size(), tensor.data_ptr()
        for start, height, length, step, stride, origin, origin_step in rows_of(
            tensor, region.full_shape, region.offset, region.shape
        ):
            address = first + start * width
            aligned = stride == 1 and (address | (length | step | origin | origin_step) * width) % _VECTOR == 0
            stand[width, _VECTOR // width if aligned else 1].extend(
                (height, address, length, step, stride, origin, origin_step, part)
            )
    return stand


def _table(stand: array[int]) -> tuple[Tensor, int]:
    """The lines, int64 [lines, _FIELDS] on the CPU, and how many programs they take."""
    given = torch.frombuffer(stand, dtype=torch.int64).view(-1, 8)
    height, _, length, _, _, origin, origin_step, _ = given.unbind(1)
    # Rows that begin at different positions of their runs are given as many windows as any may touch.
    into = torch.where(origin_step % RUN == 0, origin % RUN, RUN - 1)
    in_a_row = (into + length - 1) // RUN + 1
    windows = height * in_a_row
    programs = (windows + _WINDOWS - 1) // _WINDOWS
    ends = programs.cumsum(0)
    ahead = torch.stack((ends, ends - programs, windows, in_a_row), 1)
    return torch.cat((ahead, given[:, 1:]), 1), int(ends[-1])
