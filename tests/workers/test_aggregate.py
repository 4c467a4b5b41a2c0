"""Aggregation: any split of a step over micro-batches and ranks gives the same loss."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.algorithms.aggregate import Aggregation, StepTotals, token_weights, weighted_sum

AGGREGATIONS = get_args(Aggregation)
MASKS = [torch.tensor(mask) for mask in ([1, 1, 1], [1, 0], [0, 0, 0], [], [1, 1, 1, 1, 0])]
TOTALS = StepTotals(tokens=8, sequences=3, max_response_len=10)


def test_values_against_the_formulas() -> None:
    losses = torch.arange(1.0, 14.0)
    mean_of = {
        "token_mean": (1 + 2 + 3 + 4 + 9 + 10 + 11 + 12) / 8,
        "sequence_mean": ((1 + 2 + 3) / 3 + 4 + (9 + 10 + 11 + 12) / 4) / 3,
        "constant": (1 + 2 + 3 + 4 + 9 + 10 + 11 + 12) / (3 * 10),
    }
    for aggregation in AGGREGATIONS:
        value = weighted_sum(losses, token_weights(MASKS, aggregation, TOTALS))
        assert float(value) == pytest.approx(mean_of[aggregation], rel=1e-6)


@given(cuts=st.lists(st.integers(0, 5), max_size=6), aggregation=st.sampled_from(AGGREGATIONS))
def test_parts_add_up_to_the_whole(cuts: list[int], aggregation: Aggregation) -> None:
    losses = torch.randn(13, generator=torch.Generator().manual_seed(1)).split([mask.numel() for mask in MASKS])
    whole = weighted_sum(torch.cat(losses), token_weights(MASKS, aggregation, TOTALS))
    bounds = [0, *sorted(cuts), len(MASKS)]
    parts = [
        weighted_sum(torch.cat(losses[a:b]), token_weights(MASKS[a:b], aggregation, TOTALS))
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_weigh_nothing_even_when_nan(aggregation: Aggregation) -> None:
    masks = [torch.tensor([1, 0])]
    losses = torch.tensor([2.0, math.nan], requires_grad=True)
    value = weighted_sum(losses, token_weights(masks, aggregation, StepTotals(1, 1, 2)))
    value.backward()
    assert torch.isfinite(value)
    assert losses.grad is not None
    assert losses.grad[1] == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("masks", [[], [torch.zeros(0)], [torch.zeros(3)]])
def test_nothing_to_learn_from_is_zero_not_nan(aggregation: Aggregation, masks: list[torch.Tensor]) -> None:
    totals = StepTotals(tokens=0, sequences=0, max_response_len=4)
    assert totals.is_empty
    weights = token_weights(masks, aggregation, totals)
    assert float(weighted_sum(torch.ones(weights.shape), weights)) == 0.0


def test_a_trajectory_split_into_rows_weighs_as_in_one_row_by_tokens() -> None:
    whole = token_weights([torch.ones(8)], "token_mean", StepTotals(8, 1, 8))
    rows = token_weights([torch.ones(2)] * 4, "token_mean", StepTotals(8, 4, 8))
    assert torch.equal(whole, rows)
