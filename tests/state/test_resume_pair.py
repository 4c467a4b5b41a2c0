"""From which iteration two roles continue together, or what is said where there is none."""

from __future__ import annotations

import pytest

from state.errors import ResumeError
from state.resume_pair import Pair, Saves, pair


def actor(*iterations: int, digest: str | None = "c") -> Saves:
    return Saves("actor", "A", dict.fromkeys(iterations, digest))


def critic(*iterations: int, digest: str | None = "c") -> Saves:
    return Saves("critic", "C", dict.fromkeys(iterations, digest))


@pytest.mark.parametrize("must", [False, True])
@pytest.mark.parametrize("ahead", [(), (4,), (4, 5)])
def test_both_continue_from_what_was_asked_where_both_have_it(must: bool, ahead: tuple[int, ...]) -> None:
    # A critic that is ahead was saved before a kill came between the two.
    assert pair(3, actor(1, 3), critic(1, 3, *ahead), must=must) == Pair(3)


def test_without_the_critics_newest_both_go_back_to_what_both_have_and_both_are_named() -> None:
    found = pair(3, actor(1, 2, 3), critic(1), must=False)
    assert found.iteration == 1
    assert found.warning is not None
    for words in (
        "the actor's newest in A is iteration 3",
        "the critic's newest in C is iteration 1",
        "from iteration 1",
    ):
        assert words in found.warning


def test_where_it_must_be_the_newest_that_is_an_error_with_what_would_work() -> None:
    with pytest.raises(ResumeError) as raised:
        pair(3, actor(1, 2, 3), critic(1), must=True)
    said = str(raised.value)
    for words in (
        "actor's newest in A is iteration 3",
        "critic's newest in C is iteration 1",
        "checkpoint.ckpt_step 1",
    ):
        assert words in said


@pytest.mark.parametrize("must", [False, True])
@pytest.mark.parametrize("others", [(), (4,), (7, 9)])
def test_nothing_in_common_is_an_error_that_names_both(must: bool, others: tuple[int, ...]) -> None:
    with pytest.raises(ResumeError) as raised:
        pair(3, actor(1, 2, 3), critic(*others), must=must)
    for words in (
        "in A is iteration 3",
        f"in C is {f'iteration {max(others)}' if others else 'none'}",
        "weights_only, checkpoint.load A, and",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize("must", [False, True])
def test_what_both_have_is_named_where_it_is_newer_than_what_was_asked_for(must: bool) -> None:
    with pytest.raises(
        ResumeError, match=r"no whole iteration 0.*newest that both have is 1: .* checkpoint\.ckpt_step 1"
    ):
        pair(0, actor(0, 1), critic(1), must=must)


def test_what_else_stands_there_is_said() -> None:
    damaged = Saves("critic", "C", {}, "iter_0000003 (the save was cut off)")
    with pytest.raises(ResumeError, match=r"newest in C is none \(iter_0000003 \(the save was cut off\)\)"):
        pair(3, actor(3), damaged, must=False)


def test_iterations_of_one_number_that_were_not_saved_as_one_are_no_pair() -> None:
    was, goes_on = Saves("actor", "A", {2: "a", 3: "b"}), Saves("critic", "C", {2: "a", 3: "c"})
    found = pair(3, was, goes_on, must=False)
    assert found.iteration == 2
    assert found.warning is not None
    assert "iteration 3 of the critic is not the one that was saved with the actor's" in found.warning


@pytest.mark.parametrize(("first", "second"), [(None, "c"), ("c", None), (None, None)])
def test_of_what_is_not_known_nothing_is_held_against_it(first: str | None, second: str | None) -> None:
    assert pair(2, actor(2, digest=first), critic(2, digest=second), must=True) == Pair(2)
