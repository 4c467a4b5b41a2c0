"""Micro-batches: a token budget, and padding to the right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.train_jobs import BUDGETS, LENGTHS, make_sample
from workers.megatron.micro_batches import collate, plan, split

CPU = torch.device("cpu")


@given(lengths=st.lists(st.integers(1, 40), max_size=30), max_tokens=st.integers(1, 100))
def test_every_sample_is_in_one_group_and_padded_groups_fit_the_budget(lengths: list[int], max_tokens: int) -> None:
    groups = split(lengths, max_tokens)
    assert sorted(position for group in groups for position in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= max_tokens


def test_a_sample_longer_than_the_budget_goes_alone() -> None:
    assert split([5, 100, 5], 10) == [[1], [0, 2]]


def test_the_same_lengths_give_the_same_groups() -> None:
    assert split([3, 7, 3, 7], 14) == [[1, 3], [0, 2]]


@pytest.mark.parametrize(("sizes", "budget"), BUDGETS.items())
def test_budgets_of_the_training_tests_split_as_they_say(sizes: tuple[int, ...], budget: int) -> None:
    assert tuple(len(group) for group in split(LENGTHS, budget)) == sizes


def test_padding_stands_on_the_right_and_rows_predict_the_next_token() -> None:
    samples = [make_sample(0, [1, 2], [3, 4, 5], [1, 1, 1]), make_sample(1, [6], [7], [1])]
    batch = collate(samples, [1, 0], CPU, multiple_of=1)
    assert batch.ids.tolist() == [[6, 7, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.targets.tolist() == [7, 3, 4, 5]
    assert batch.rows.tolist() == [0, 6, 7, 8]
    assert batch.lengths == (1, 3)
    # The row that predicts a token holds the token before it.
    assert batch.ids.flatten()[batch.rows].tolist() == [6, 2, 3, 4]


def test_widths_are_rounded_up_where_sequences_are_split_over_ranks() -> None:
    batch = collate([make_sample(0, [1, 2], [3], [1])], [0], CPU, multiple_of=4)
    assert batch.ids.tolist() == [[1, 2, 3, 0]]


def test_an_empty_response_has_no_rows() -> None:
    batch = collate([make_sample(0, [1, 2], [], []), make_sample(1, [3], [4], [1])], [0, 1], CPU, multiple_of=1)
    assert batch.lengths == (0, 1)
    assert batch.targets.tolist() == [4]


def test_a_rank_without_samples_still_has_a_batch() -> None:
    (batch,) = plan([], max_tokens=10, device=CPU, multiple_of=2)
    assert batch.ids.shape == (1, 2)
    assert batch.targets.numel() == 0
    assert batch.members == ()


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 1/4 has an empty prompt"):
        collate([make_sample(4, [], [1], [1])], [0], CPU, multiple_of=1)
