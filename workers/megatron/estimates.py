"""From a critic's values to advantages and returns, over the ranks of a gang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workers.algorithms.gae import Moments, generalised_advantages, token_rewards, whitened
from workers.algorithms.kl import kl_per_token
from workers.batch import Sample
from workers.config import AlgorithmConfig

T = TypeVar("T")

Values = Sequence[Tensor] | None
"""A critic's values of a rank's samples, in their order; float32 [response_len]. None before the last stage."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the critic learns of a rank's samples, in their order; float32 [response_len] each: its own values when they
    were made, and the returns."""

    values: Sequence[Tensor]
    returns: Sequence[Tensor]


def estimate(
    samples: Sequence[Sample],
    values: Values,
    behaviour: Sequence[Tensor],
    ref: Sequence[Tensor | None],
    algorithm: AlgorithmConfig,
    group: dist.ProcessGroup,
) -> tuple[list[Tensor], Targets]:
    """Advantages per token, and what the critic is to learn.

    `behaviour` and `ref` are log-probs per sample; a KL between them joins the rewards, token by token. `group` holds
    the data-parallel ranks, which whiten together.

    Raises:
        ValueError: values are missing, or do not fit a sample's tokens.
    """
    _check(samples, values)
    assert values is not None
    masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in samples]
    estimated = []
    for sample, mask, own, old, other in zip(samples, masks, values, behaviour, ref, strict=True):
        assert sample.reward is not None
        penalties = None
        if other is not None and algorithm.kl_coef > 0:
            penalties = algorithm.kl_coef * kl_per_token(old, other, mask, algorithm.kl_estimator)
        rewards = token_rewards(sample.reward, penalties, mask)
        estimated.append(
            generalised_advantages(rewards, own, mask, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
        )
    advantages = [one.advantages for one in estimated]
    if algorithm.normalize_advantages:
        moments = Moments.sum(gathered(Moments.of(advantages, masks), group))
        advantages = [
            whitened(one, mask, moments.mean, moments.variance) for one, mask in zip(advantages, masks, strict=True)
        ]
    return advantages, Targets(values, [one.returns for one in estimated])


def gathered(own: T, group: dist.ProcessGroup) -> list[T]:
    """By rank of `group`, what each brings; all of them call it together."""
    everyone: list[T] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _check(samples: Sequence[Sample], values: Values) -> None:
    if values is None:
        raise ValueError("generalised advantages need the values of a critic, and none were given")
    if len(values) != len(samples):
        raise ValueError(f"{len(values)} samples have values; this rank has {len(samples)}")
    for sample, own in zip(samples, values, strict=True):
        if tuple(own.shape) != (len(sample.response_ids),):
            name = f"sample {sample.group_id}/{sample.index}"
            raise ValueError(f"{name} has {len(sample.response_ids)} response tokens and values {tuple(own.shape)}")
