"""Advantages with a critic: generalised advantage estimation, per token. Pure functions.

A state is a prompt with the response so far, an action is the next token; `values[t]` is the critic's of the state that
token t is chosen in, and what follows the last token is worth 0. Tokens that do not count (tool output) are no actions:
the estimate goes past them, from the token before to the token after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STD_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Estimate:
    """Float32 [response_len], without gradient, 0 where the mask is 0. `returns` are what values are to become."""

    advantages: Tensor
    returns: Tensor


def token_rewards(reward: float, penalties: Tensor | None, mask: Tensor) -> Tensor:
    """The reward of a whole sample on its last token that counts, minus a penalty on each: float32 [response_len].

    `penalties` [response_len] are what a KL to a reference costs (None: nothing). PPO for language models, arXiv
    1909.08593, section 2. Whatever stands where the mask is 0 has no influence.
    """
    keep = mask.bool()
    rewards = torch.zeros(mask.shape)
    if penalties is not None:
        rewards = torch.where(keep, -penalties.detach().float().cpu(), rewards)
    counted = torch.nonzero(keep).flatten()
    if counted.numel():
        rewards[counted[-1]] += reward
    return rewards


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> Estimate:
    """GAE(gamma, lambda) of one sample; all arguments [response_len].

        delta_t = rewards_t + gamma x values_(t+1) - values_t
        A_t = delta_t + gamma x lambda x A_(t+1)            returns_t = A_t + values_t

    Schulman et al., arXiv 1506.02438, equation 16, as used by PPO (Schulman et al., arXiv 1707.06347, equation 11).
    With lambda 1 the returns are discounted sums of rewards, with lambda 0 they are one step of the critic's own.
    """
    keep = mask.bool().cpu()
    own = values.detach().cpu()[keep].tolist()
    paid = rewards.detach().cpu()[keep].tolist()
    estimated = [0.0] * len(own)
    following, advantage = 0.0, 0.0
    for t in range(len(own) - 1, -1, -1):
        advantage = paid[t] + gamma * following - own[t] + gamma * gae_lambda * advantage
        estimated[t], following = advantage, own[t]
    return Estimate(_spread(estimated, keep), _spread([a + v for a, v in zip(estimated, own, strict=True)], keep))


@dataclass(frozen=True, slots=True)
class Moments:
    """Of some of the numbers that are to be whitened together; those of all parts add up."""

    count: int
    total: float
    squares: float

    @staticmethod
    def of(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Moments:
        """Of what counts in `values`."""
        counted = [v.double()[m.bool()] for v, m in zip(values, masks, strict=True)]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *counted])
        return Moments(flat.numel(), float(flat.sum()), float((flat * flat).sum()))

    @staticmethod
    def sum(parts: Sequence[Moments]) -> Moments:
        return Moments(sum(p.count for p in parts), sum(p.total for p in parts), sum(p.squares for p in parts))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Of the sample (n - 1); 0 for fewer than two numbers."""
        spread = self.squares - self.total * self.mean
        return max(0.0, spread) / (self.count - 1) if self.count > 1 else 0.0


def whitened(advantages: Tensor, mask: Tensor, mean: float, variance: float) -> Tensor:
    """`advantages` from the mean, over the standard deviation; 0 where the mask is 0."""
    scaled = (advantages.double() - mean) / (math.sqrt(variance) + _STD_EPS)
    return torch.where(mask.bool(), scaled, torch.zeros((), dtype=torch.float64)).float()


def _spread(counted: Sequence[float], keep: Tensor) -> Tensor:
    spread = torch.zeros(keep.shape)
    spread[keep] = torch.tensor(counted, dtype=torch.float32)
    return spread
