"""Generalised advantages against the sum that defines them; whatever does not count has no influence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workers.algorithms.gae import Moments, generalised_advantages, token_rewards, whitened

NAN = float("nan")


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_t = sum over l of (gamma lambda)^l delta_(t+l), each delta_t = r_t + gamma V_(t+1) - V_t, V after the end 0."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * following - v for r, v, following in zip(rewards, values, after, strict=True)]
    advantages = [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def drawn(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator), torch.randn(length, generator=generator)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 50])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 0.7), (1.0, 0.3)])
def test_it_is_the_discounted_sum_of_temporal_differences(length: int, gamma: float, lam: float) -> None:
    rewards, values = drawn(length)
    found = generalised_advantages(rewards, values, torch.ones(length), gamma=gamma, gae_lambda=lam)
    advantages, returns = by_definition(rewards.tolist(), values.tolist(), gamma, lam)
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-5)
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-5)


def test_with_lambda_one_returns_are_what_was_really_paid() -> None:
    rewards, values = drawn(5)
    found = generalised_advantages(rewards, values, torch.ones(5), gamma=1.0, gae_lambda=1.0)
    assert found.returns.tolist() == pytest.approx(rewards.flip(0).cumsum(0).flip(0).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "mask", [[1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]]
)
def test_tokens_that_do_not_count_are_passed_over_whatever_stands_there(mask: list[int]) -> None:
    rewards, values = drawn(7)
    kept = [i for i, one in enumerate(mask) if one]
    advantages, returns = by_definition(rewards[kept].tolist(), values[kept].tolist(), 0.9, 0.8)
    dirty = torch.where(torch.tensor(mask).bool(), values, torch.tensor([NAN, math.inf] * 3 + [NAN]))
    found = generalised_advantages(rewards, dirty, torch.tensor(mask), gamma=0.9, gae_lambda=0.8)
    assert found.advantages[kept].tolist() == pytest.approx(advantages, abs=1e-5)
    assert found.returns[kept].tolist() == pytest.approx(returns, abs=1e-5)
    rest = [i for i in range(7) if i not in kept]
    assert found.advantages[rest].tolist() == found.returns[rest].tolist() == [0.0] * len(rest)


def test_estimates_carry_no_gradient_to_the_critic() -> None:
    rewards, values = drawn(4)
    found = generalised_advantages(rewards, values.requires_grad_(), torch.ones(4), gamma=1.0, gae_lambda=0.9)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad


def test_the_reward_is_paid_with_the_last_token_that_counts_and_penalties_with_each() -> None:
    mask = torch.tensor([1, 1, 0, 1, 0])
    assert token_rewards(2.0, None, mask).tolist() == [0, 0, 0, 2, 0]
    penalties = torch.tensor([0.5, 0.25, NAN, 1.0, NAN])
    assert token_rewards(2.0, penalties, mask).tolist() == [-0.5, -0.25, 0, 1, 0]
    assert token_rewards(2.0, penalties[:0], mask[:0]).tolist() == []
    assert token_rewards(2.0, None, torch.zeros(3)).tolist() == [0, 0, 0]


def test_whitened_over_all_parts_mean_is_zero_and_deviation_one() -> None:
    parts = [drawn(6, seed)[0] * 3 + 5 for seed in range(3)]
    masks = [torch.tensor(m) for m in ([1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0])]
    dirty = [torch.where(m.bool(), p, torch.tensor(NAN)) for p, m in zip(parts, masks, strict=True)]
    split = Moments.sum([Moments.of(dirty[:1], masks[:1]), Moments.of(dirty[1:], masks[1:])])
    white = [whitened(p, m, split.mean, split.variance) for p, m in zip(dirty, masks, strict=True)]
    counted = torch.cat([w[m.bool()] for w, m in zip(white, masks, strict=True)])
    assert float(counted.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(counted.std()) == pytest.approx(1.0, abs=1e-5)
    assert all(not bool(w[~m.bool()].any()) for w, m in zip(white, masks, strict=True))


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0, 2.0]])
def test_numbers_that_do_not_differ_whiten_to_zero(values: list[float]) -> None:
    tensor, mask = torch.tensor(values), torch.ones(len(values))
    moments = Moments.of([tensor], [mask])
    assert whitened(tensor, mask, moments.mean, moments.variance).tolist() == pytest.approx([0.0] * len(values))
