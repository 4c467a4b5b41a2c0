"""How many groups a `fully_async` loop may have begun, and what is too stale to be trained on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rollouts.staleness import accepted, capacity, is_too_stale

COUNTS = st.integers(0, 50)


@pytest.mark.parametrize("version", [0, 1, 50])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_run_that_continues_may_begin_as_many_as_a_fresh_one(version: int, max_staleness: int) -> None:
    """Not `version` batches more: what was trained before counts as accepted, whoever trained it."""
    taken = accepted(trained=version, batch=8, waiting=0, under_way=0)
    assert capacity(max_staleness, version, 8, taken) == (max_staleness + 1) * 8


@given(trained=COUNTS, behind=st.integers(0, 3), waiting=COUNTS, under_way=COUNTS, batch=st.integers(1, 9))
def test_what_is_begun_is_trained_on_within_the_bound(
    trained: int, behind: int, waiting: int, under_way: int, batch: int
) -> None:
    """Trained in the order in which it was begun, the last group that fits is exactly at the bound."""
    bound, version = 3, max(0, trained - behind)
    taken = accepted(trained, batch, waiting, under_way)
    room = capacity(bound, version, batch, taken)
    if room > 0:
        assert not is_too_stale(version, (taken + room - 1) // batch, bound)
    assert is_too_stale(version, (taken + max(room, 0)) // batch, bound)


def test_what_waits_or_is_under_way_takes_room_and_what_is_given_up_returns_it() -> None:
    assert capacity(1, 5, 8, accepted(5, 8, waiting=8, under_way=3)) == 5
    assert capacity(1, 5, 8, accepted(5, 8, waiting=7, under_way=3)) == 6
    assert capacity(1, 6, 8, accepted(6, 8, waiting=0, under_way=3)) == 13


@pytest.mark.parametrize(
    ("version", "rollout_id", "too_stale"), [(4, 4, False), (4, 6, False), (4, 7, True), (None, 9, False), (0, 3, True)]
)
def test_a_sample_is_too_stale_once_more_versions_lie_in_between(
    version: int | None, rollout_id: int, too_stale: bool
) -> None:
    assert is_too_stale(version, rollout_id, 2) is too_stale
