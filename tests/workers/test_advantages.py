"""Advantages: rewards relative to the group, whatever order and sizes the groups come in."""

from __future__ import annotations

import math
import random

import pytest
import torch

from workers.algorithms.advantages import group_relative, penalised_reward


def test_each_group_is_centred_on_its_own_mean_when_groups_are_uneven() -> None:
    groups = [0] * 4 + [1] * 3 + [2] * 4
    rewards = [0.0, 1.0, 1.0, 0.5, 5.0, 6.0, 9.0, -1.0, -2.0, -3.0, -7.0]
    for by_std in (True, False):
        advantages = group_relative(rewards, groups, normalize_by_std=by_std)
        for group in range(3):
            assert advantages[[g == group for g in groups]].mean().abs() < 1e-6


def test_values_against_the_formula() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 3.0, 7.0], [4, 4, 4, 4, 9, 9]
    plain = group_relative(rewards, groups, normalize_by_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, -2.0, 2.0]
    scaled = group_relative(rewards, groups, normalize_by_std=True)
    up, wide = 0.5 / math.sqrt(1 / 3), 2 / math.sqrt(8)
    assert scaled.tolist() == pytest.approx([up, -up, -up, up, -wide, wide], abs=1e-5)


def test_order_of_samples_changes_nothing() -> None:
    rng = random.Random(0)
    samples = [(rng.random(), rng.randrange(5)) for _ in range(40)]
    expected = group_relative([r for r, _ in samples], [g for _, g in samples], normalize_by_std=True)
    order = list(range(40))
    rng.shuffle(order)
    shuffled = group_relative([samples[i][0] for i in order], [samples[i][1] for i in order], normalize_by_std=True)
    assert torch.equal(shuffled, expected[order])


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_relative([3.0, 1.0, 2.0], [7, 8, 8], normalize_by_std=True)[0] == 0.0


def test_equal_rewards_have_exactly_no_advantage() -> None:
    # The mean of three 0.1 is not 0.1 in floating point; divided by a tiny deviation this would be an advantage.
    assert group_relative([0.1] * 3 + [1.0, 0.0], [0, 0, 0, 1, 1], normalize_by_std=True)[:3].tolist() == [0.0] * 3


def test_nothing_in_nothing_out() -> None:
    assert group_relative([], [], normalize_by_std=True).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"positions \[1\]"):
        group_relative([0.0, bad, 1.0], [0, 0, 0], normalize_by_std=True)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="one entry a sample"):
        group_relative([0.0, 1.0], [0], normalize_by_std=True)


def test_kl_is_taken_off_the_reward_over_loss_tokens_only() -> None:
    new, ref = torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.5, -1.0, -3.0])
    mask = torch.tensor([1, 1, 0])
    assert penalised_reward(2.0, new, ref, mask, kl_coef=0.5, estimator="k1") == pytest.approx(2.0 - 0.5 * (0.5 - 1.0))
    assert penalised_reward(2.0, new, ref, mask, kl_coef=0.5, estimator="k2") == pytest.approx(2.0 - 0.5 * 0.625)
    assert penalised_reward(2.0, new, ref, mask * 0, kl_coef=0.5, estimator="k3") == 2.0


def test_a_zero_coefficient_keeps_nan_of_the_reference_out() -> None:
    nan = torch.tensor([math.nan])
    assert penalised_reward(2.0, nan, nan, torch.ones(1), kl_coef=0.0, estimator="k3") == 2.0
