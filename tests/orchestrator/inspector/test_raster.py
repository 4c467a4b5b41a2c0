"""Many lanes in few columns: what a cell says, against the plain way to find it out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.inspector.codes import BAD, BRIEF, CODES, NONE, code
from orchestrator.inspector.raster import Segments, Window, newest_first, rasterise, wide

ACTOR, REF, SWITCHING, STEPPING, POISONED = map(code, ("actor", "ref", "switching", "stepping", "poisoned"))


def segments(*lanes: list[tuple[float, int]]) -> Segments:
    """Of lanes, each a list of (start, code); the last of a lane lasts."""
    rows = [
        (lane, index, start, moments[index + 1][0] if index + 1 < len(moments) else np.inf, state)
        for lane, moments in enumerate(lanes)
        for index, (start, state) in enumerate(moments)
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    integers = [np.array(column, np.int64) for column in (columns[0], columns[1], columns[4])]
    floats = [np.array(column, np.float64) for column in (columns[2], columns[3])]
    return Segments(integers[0], integers[1], floats[0], floats[1], integers[2])


def test_a_column_shows_what_filled_most_of_it_and_a_short_borrow_besides() -> None:
    lane = [(0.0, ACTOR), (4.0, SWITCHING), (4.5, REF), (4.75, SWITCHING), (5.25, STEPPING)]
    cells = rasterise(segments(lane), [0], Window(0, 10, 1), now=9.0)
    assert cells.tolist() == [[[ACTOR, REF, 7]]]  # 0.25 of 10 s are 6.4 of 255


def test_one_moment_of_poison_shows() -> None:
    lane = [(0.0, ACTOR), (4.0, POISONED), (4.001, ACTOR)]
    assert rasterise(segments(lane), [0], Window(0, 10, 1), now=10)[0, 0, 0] == POISONED


def test_before_the_first_entry_and_after_now_there_is_nothing() -> None:
    cells = rasterise(segments([(3.0, ACTOR)]), [0], Window(0, 10, 10), now=6.0)
    assert [bool(first) for first in cells[0, :, 0]] == [False] * 3 + [True] * 3 + [False] * 4


def test_lanes_come_in_the_order_asked_for() -> None:
    both = segments([(0.0, ACTOR)], [(0.0, REF)])
    assert rasterise(both, [1, 0], Window(0, 1, 1), now=1)[:, 0, 0].tolist() == [REF, ACTOR]
    assert rasterise(both, [1], Window(0, 1, 1), now=1)[:, 0, 0].tolist() == [REF]
    assert rasterise(segments(), [], Window(0, 1, 3), now=1).shape == (0, 3, 3)


def test_words_go_where_there_is_room_in_the_window() -> None:
    lane = [(0.0, ACTOR), (4.0, REF), (5.0, ACTOR)]
    assert wide(segments(lane), [0], Window(0, 10, 100), now=8.0, columns=20).tolist() == [0, 2]
    assert wide(segments(lane), [0], Window(3.9, 4.9, 100), now=8.0, columns=20).tolist() == [1]


def test_the_newest_transitions_come_first() -> None:
    both = segments([(0.0, ACTOR), (4.0, REF)], [(1.0, ACTOR), (9.0, REF)])
    assert newest_first(both, [0, 1], Window(0, 5, 1)).tolist() == [1, 2, 0]
    assert newest_first(both, [1], Window(0, 5, 1)).tolist() == [2]


moments = st.lists(
    st.tuples(st.integers(0, 400).map(lambda at: at / 16), st.integers(0, len(CODES) - 1)), min_size=0, max_size=12
).map(lambda lane: sorted(lane, key=lambda moment: moment[0]))


@settings(max_examples=150, deadline=None)
@given(lanes=st.lists(moments, min_size=1, max_size=4), start=st.integers(0, 20), seconds=st.integers(1, 30),
       columns=st.integers(1, 9), now=st.integers(0, 30))  # fmt: skip
def test_every_cell_is_what_counting_finds(
    lanes: list[list[tuple[float, int]]], start: int, seconds: int, columns: int, now: int
) -> None:
    window = Window(start, start + seconds, columns)
    cells = rasterise(segments(*lanes), range(len(lanes)), window, now=float(now))
    for row, lane in enumerate(lanes):
        for column in range(columns):
            low = start + column * window.seconds
            filled = counted(lane, low, low + window.seconds, now)
            first, second, share = (int(value) for value in cells[row, column])
            check(filled, first, second, share, window.seconds)


def counted(lane: list[tuple[float, int]], low: float, high: float, now: float) -> dict[int, float]:
    filled: dict[int, float] = {}
    for index, (begin, state) in enumerate(lane):
        end = lane[index + 1][0] if index + 1 < len(lane) else np.inf
        part = min(end, high, now) - max(begin, low)
        if part > 1e-9 and state != NONE:
            filled[state] = filled.get(state, 0.0) + part
    return filled


def check(filled: dict[int, float], first: int, second: int, share: int, seconds: float) -> None:
    if not filled:
        assert first == NONE
        return
    bad = [state for state in filled if CODES[state] in BAD]
    if bad:
        assert first in bad
    else:
        assert filled[first] >= max(filled.values()) - 1e-6
    rest = {state: part for state, part in filled.items() if state != first}
    if not rest:
        assert (second, share) == (NONE, 0)
        return
    sought = {state: part for state, part in rest.items() if CODES[state] in BRIEF} or rest
    assert sought[second] >= max(sought.values()) - 1e-6
    assert abs(share - 255 * rest[second] / seconds) <= 1.01
