"""Who trains on what: nothing lost, nothing doubled, nothing without a reward, the same every time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch import balance, shards
from state.slots import WeightId
from workers.batch import Sample


def sample(group: int, index: int, length: int = 2, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "group_id": group,
        "index": index,
        "prompt_ids": (1, 2),
        "response_ids": (3,) * length,
        "logprobs": (-0.5,) * length,
        "loss_mask": (1,) * length,
        "versions": (WeightId(0, 0),),
        "seed": 0,
        "finish_reason": "stop",
        "reward": float(index),
    }
    return Sample(**{**values, **changes})


def batch(lengths: list[int], group_size: int = 4) -> list[Sample]:
    return [sample(i // group_size, i % group_size, length) for i, length in enumerate(lengths)]


lengths = st.lists(st.integers(0, 40), max_size=40)


@given(lengths=lengths, num_steps=st.integers(1, 4), dp=st.integers(1, 5))
def test_every_sample_is_trained_exactly_once(lengths: list[int], num_steps: int, dp: int) -> None:
    samples = batch(lengths)
    result = shards(9, samples, num_steps, dp)
    assert [len(shard.steps) for shard in result] == [num_steps] * dp
    trained = sorted((s.group_id, s.index) for shard in result for s in shard.samples)
    assert trained == [(s.group_id, s.index) for s in samples]
    assert {shard.rollout_id for shard in result} == {9}


@given(lengths=lengths, num_steps=st.integers(1, 4), dp=st.integers(1, 5))
def test_totals_are_over_all_ranks_of_a_step(lengths: list[int], num_steps: int, dp: int) -> None:
    for parts in zip(*(shard.steps for shard in shards(0, batch(lengths), num_steps, dp)), strict=True):
        samples = [s for part in parts for s in part.samples]
        for part in parts:
            assert part.total_tokens == sum(s.num_loss_tokens for s in samples)
            assert part.total_sequences == sum(s.num_loss_tokens > 0 for s in samples)


@given(lengths=lengths, num_steps=st.integers(1, 4), dp=st.integers(1, 5))
def test_a_rank_is_idle_in_a_step_only_when_there_are_fewer_samples_than_ranks(
    lengths: list[int], num_steps: int, dp: int
) -> None:
    for parts in zip(*(shard.steps for shard in shards(0, batch(lengths), num_steps, dp)), strict=True):
        counts = [len(part.samples) for part in parts]
        assert min(counts) > 0 or sum(counts) < dp


def test_steps_take_samples_in_order_also_when_they_do_not_divide() -> None:
    result = shards(0, batch([2] * 10, group_size=1), 3, 1)
    assert [[s.group_id for s in step.samples] for step in result[0].steps] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_the_same_samples_give_the_same_shards() -> None:
    samples = batch([7, 1, 5, 5, 2, 9, 9, 3])
    assert shards(0, samples, 2, 2) == shards(0, list(samples), 2, 2)


def test_tokens_are_balanced_within_a_step() -> None:
    result = shards(0, batch([30, 1, 1, 1, 27, 1, 1, 1]), 1, 2)
    loads = [sum(s.num_tokens for s in shard.samples) for shard in result]
    assert max(loads) - min(loads) <= 3


def test_samples_without_reward_and_aborted_ones_never_reach_training() -> None:
    samples = [sample(0, 0), sample(0, 1, reward=None), sample(0, 2, finish_reason="abort"), sample(0, 3)]
    (shard,) = shards(0, samples, 1, 1)
    assert [s.index for s in shard.samples] == [0, 3]
    assert shard.steps[0].total_sequences == 2


def test_a_reward_of_zero_is_a_reward() -> None:
    (shard,) = shards(0, [sample(0, 0, reward=0.0)], 1, 1)
    assert len(shard.samples) == 1


def test_an_empty_response_is_kept_and_counts_nothing() -> None:
    (shard,) = shards(0, [sample(0, 0, length=0), sample(0, 1, length=3)], 1, 1)
    assert len(shard.samples) == 2
    assert (shard.steps[0].total_tokens, shard.steps[0].total_sequences) == (3, 1)


def test_nothing_left_to_train_on_gives_empty_steps() -> None:
    result = shards(0, [sample(0, 0, reward=None)], 2, 2)
    assert [[len(step.samples) for step in shard.steps] for shard in result] == [[0, 0], [0, 0]]


@given(costs=st.lists(st.integers(0, 100), max_size=30), parts=st.integers(1, 6))
def test_balance_is_a_partition_within_one_item_of_the_mean(costs: list[int], parts: int) -> None:
    own = balance(costs, parts)
    assert sorted(i for indices in own for i in indices) == list(range(len(costs)))
    heaviest = max(sum(costs[i] for i in indices) for indices in own)
    assert heaviest <= sum(costs) / parts + max(costs, default=0)


def test_no_steps_or_no_ranks_is_refused() -> None:
    for num_steps, dp in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            shards(0, [], num_steps, dp)
