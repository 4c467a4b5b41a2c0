"""The real slot machine and the real `agree`, driven through everything that can be asked and can go wrong.

Each world goes on from the calls that it follows until no new state is left; from every state each other call is made
as well. See `toy_world` for what must hold after each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from state.slots import Tier
from tests.prove.explorer import Coverage, closure, interleavings
from tests.prove.toy_world import Bounds

READY = Bounds(versions=1, strays=False, from_cold=False)
MOVING = "step write exit raise heal borrow snapshot"

WORLDS = {
    "init": Bounds(versions=0, strays=False, followed="load ready heal"),
    "steps": replace(READY, versions=2, followed="step exit raise heal write write_late write_silently"),
    "borrows": replace(READY, versions=0, followed="exit raise heal borrow snapshot scribble"),
    "borrows on the device": replace(READY, versions=0, tier=Tier.DEVICE, followed="borrow scribble exit raise heal"),
    "letting out": replace(READY, followed="agree publish save send store exit raise heal"),
    "sleeping": replace(READY, strays=True, followed="sleep wake heal stray borrow exit step write"),
}
GANG = replace(READY, ranks=2, followed="agree publish save send exit step write")

LARGER = {
    "init with damaged memory": replace(WORLDS["init"], strays=True, followed="load ready heal agree stray"),
    "a ring": replace(READY, followed=f"{MOVING} scribble"),
    "a ring on the device": replace(READY, tier=Tier.DEVICE, followed=f"{MOVING} scribble"),
    "two ranks that fail": GANG,
}
EXPECTED = (
    "resident.actor",
    "resident.ref in borrow",
    "stepping in step",
    "publishing in publish",
    "asleep",
    "poisoned",
)


@pytest.fixture(scope="module")
def total() -> Coverage:
    """Of what ran so far, for the last test to print."""
    return Coverage()


@pytest.mark.parametrize("name", WORLDS)
def test_one_rank_holds_whatever_is_asked_and_whatever_fails(total: Coverage, name: str) -> None:
    total.add(closure(WORLDS[name]))


def test_a_ring_of_old_actors_holds_each_version_and_no_step_is_lost(total: Coverage) -> None:
    total.add(closure(replace(READY, followed=MOVING), faults=0))


def test_two_ranks_let_nothing_out_that_they_do_not_agree_on(total: Coverage) -> None:
    total.add(closure(GANG, faults=0))


def test_every_place_was_reached_and_left_by_every_fault(
    total: Coverage, record_property: Callable[[str, object], None]
) -> None:
    record_property("counted", f"model checker: {total}")
    places = {place for ranks, _, _ in total.edges for place in ranks}
    assert places >= set(EXPECTED)
    faults = {fault.split("#")[0] for _, _, fault in total.edges if fault}
    assert faults >= {
        "loader", "copy", "clone", "point", "storage", "hash", "journal", "capture", "restore", "masters", "gather",
        "optimizer: masters moved", "optimizer: wrote", "agree", "bucket", "write", "write kept", "written",
    }  # fmt: skip
    asked = {call[0] for _, call, _ in total.edges}
    assert asked >= {"load", "ready", "borrow", "step", "snapshot", "agree", "publish", "save", "sleep", "wake", "heal"}


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_interleavings(record_property: Callable[[str, object], None]) -> None:
    total = Coverage()
    for bounds in LARGER.values():
        total.add(closure(bounds))
    busy = replace(GANG, followed="agree publish save send store exit raise step write borrow")
    for bounds, length in ((busy, 5), (replace(busy, ranks=3), 5)):
        total.add(interleavings(bounds, length))
    record_property("counted", f"model checker: {total}")
    assert total.interleavings >= 100_000
