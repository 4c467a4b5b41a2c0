"""Lanes as a grid: what each lane was, mostly and besides, in each column of a window of time. Pure.

At 512 lanes and 100,000 transitions a screen has no room for what happened: a column stands for a stretch of time, and
a cell says the state that filled most of it, one more that deserves to be seen, and that one's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.inspector.codes import BAD, BRIEF, CODES, NONE, numbers
from orchestrator.inspector.lanes import Lane

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_SHARE = 255


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of time in one state, of all lanes: parallel arrays, `index` counting within each lane.

    `end` is +inf while it lasts.
    """

    lane: Ints
    index: Ints
    start: Floats
    end: Floats
    code: Ints

    @staticmethod
    def of(lanes: Sequence[Lane], began: Sequence[float], over: Sequence[float]) -> Segments:
        """`began` and `over`: when each start of the driver began, and when all that it had started had ended."""
        counts = [len(lane.times) for lane in lanes]
        which = np.repeat(np.arange(len(lanes), dtype=np.int64), counts)
        index = np.concatenate([np.arange(count, dtype=np.int64) for count in counts] or [np.empty(0, np.int64)])
        start = np.concatenate([np.array(lane.times, dtype=np.float64) for lane in lanes] or [np.empty(0)])
        code = np.concatenate([np.array(lane.codes, dtype=np.int64) for lane in lanes] or [np.empty(0, np.int64)])
        end = np.full(len(start), np.inf)
        if len(start):
            follows = which[1:] == which[:-1]
            end[:-1][follows] = start[1:][follows]
        if len(began):
            life = np.clip(np.searchsorted(np.asarray(began), start, side="right") - 1, 0, None)
            end = np.maximum(np.minimum(end, np.asarray(over)[life]), start)
        return Segments(which, index, start, end, code)


@dataclass(frozen=True, slots=True)
class Window:
    """`columns` stretches of equal length between two wall times, in seconds."""

    start: float
    end: float
    columns: int

    @property
    def seconds(self) -> float:
        """Of one column."""
        return (self.end - self.start) / self.columns


def rasterise(segments: Segments, lanes: Sequence[int], window: Window, now: float) -> NDArray[np.uint8]:
    """uint8 `[len(lanes), columns, 3]`: code of the state that filled most, code of another one or 0, its share of 255.

    What lasts is taken to last until `now`. A bad state is the first code wherever it occurs. The second is the one
    that is looked for (`codes.BRIEF`) and filled most; without any, whatever filled second most.
    """
    cells = np.zeros((len(lanes) * window.columns, 3), np.uint8)
    parts = _Parts.cut(segments, lanes, window, now)
    where, code = parts.whole_cells()
    cells[where, 0] = code
    where, code, share = parts.part_cells()
    if len(where):
        mixed, of_cell = _compact(where, len(cells))
        present, of_code = _compact(code, len(CODES))
        size = len(mixed) * len(present)
        shares = np.bincount(of_cell * len(present) + of_code, share, minlength=size).astype(np.float64)
        cells[mixed] = _chosen(shares.reshape(len(mixed), -1), present)
    return cells.reshape(len(lanes), window.columns, 3)


def newest_first(segments: Segments, lanes: Sequence[int], window: Window) -> Ints:
    """Indices of the segments that begin in the window."""
    inside = (segments.start >= window.start) & (segments.start <= window.end)
    chosen = np.flatnonzero(inside & np.isin(segments.lane, np.asarray(lanes, np.int64)))
    return chosen[np.argsort(-segments.start[chosen], kind="stable")]


def wide(segments: Segments, lanes: Sequence[int], window: Window, now: float, columns: int) -> Ints:
    """Indices of the segments with room for words: at least `columns` wide in this window."""
    end = np.minimum(segments.end, now)
    visible = np.minimum(end, window.end) - np.maximum(segments.start, window.start)
    chosen = (visible >= columns * window.seconds) & np.isin(segments.lane, np.asarray(lanes, np.int64))
    return np.flatnonzero(chosen)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Segments cut to a window, in columns from its start; `base` is the first cell of the lane."""

    base: Ints
    begin: Floats
    end: Floats
    code: Ints

    @staticmethod
    def cut(segments: Segments, lanes: Sequence[int], window: Window, now: float) -> _Parts:
        row = np.full(max(int(segments.lane.max(initial=-1)), max(lanes, default=-1)) + 1, -1, np.int64)
        row[np.asarray(lanes, np.int64)] = np.arange(len(lanes))
        end = np.minimum(np.minimum(segments.end, now), window.end)
        begin = np.maximum(segments.start, window.start)
        keep = np.flatnonzero((end > begin) & (row[segments.lane] >= 0) & (segments.code != NONE))
        base = row[segments.lane[keep]] * window.columns
        begin, end = ((at[keep] - window.start) / window.seconds for at in (begin, end))
        return _Parts(base, begin, np.minimum(end, window.columns), segments.code[keep])

    def whole_cells(self) -> tuple[Ints, Ints]:
        """Cells that one segment fills, and its code."""
        first = np.ceil(self.begin).astype(np.int64)
        count = np.maximum(np.floor(self.end).astype(np.int64) - first, 0)
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(self.base + first, count) + step, np.repeat(self.code, count)

    def part_cells(self) -> tuple[Ints, Ints, Floats]:
        """Cells that a segment fills in part, its code, and the share it fills. A cell may come more than once."""
        first, last = np.floor(self.begin).astype(np.int64), np.floor(self.end).astype(np.int64)
        head = (self.begin > first) | (last == first)
        tail = (last > first) & (self.end > last)
        return (
            np.concatenate([(self.base + first)[head], (self.base + last)[tail]]),
            np.concatenate([self.code[head], self.code[tail]]),
            np.concatenate([(np.minimum(self.end, first + 1) - self.begin)[head], (self.end - last)[tail]]),
        )


def _compact(values: Ints, limit: int) -> tuple[Ints, Ints]:
    """The distinct values in order, and for each value its place among them."""
    there = np.zeros(limit, bool)
    there[values] = True
    distinct = np.flatnonzero(there)
    place = np.zeros(limit, np.int64)
    place[distinct] = np.arange(len(distinct))
    return distinct, place[values]


def _chosen(shares: Floats, present: Ints) -> Ints:
    """`[cells, codes]` -> `[cells, 3]`, see `rasterise`."""
    each = np.arange(len(shares))
    first = shares.argmax(axis=1)
    for bad in np.flatnonzero(np.isin(present, numbers(BAD))):
        first[shares[:, bad] > 0] = bad
    shares[each, first] = 0.0
    sought = np.where(shares > 0, np.isin(present, numbers(BRIEF)), 0.0)
    second = (shares + sought).argmax(axis=1)
    share = shares[each, second]
    scaled = np.clip(np.ceil(share * MOST_SHARE), 1, MOST_SHARE).astype(np.int64)
    return np.stack([present[first], np.where(share > 0, present[second], NONE), np.where(share > 0, scaled, 0)], 1)
