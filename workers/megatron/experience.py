"""From samples and scores to what is trained on: behaviour log-probs, penalised rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workers.algorithms.advantages import group_relative, penalised_reward
from workers.batch import Sample, TrainShard
from workers.config import AlgorithmConfig
from workers.megatron.loss import TrainSample


@dataclass(frozen=True, slots=True)
class Scored:
    """Per sample, in the order of the shard, float32 [response_len]: log-probs of the resident actor (None: not
    needed) and of the reference (None: no KL term)."""

    actor: Sequence[Tensor] | None
    ref: Sequence[Tensor] | None


def assemble(
    shard: TrainShard, scored: Scored, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[tuple[TrainSample, ...], ...]:
    """One tuple of `TrainSample` per optimizer step.

    `group` holds the data-parallel ranks: rewards are gathered over it, since members of one prompt's group may be
    trained on different ranks. All of its ranks call this together.
    """
    samples = shard.samples
    engine = [torch.tensor(sample.logprobs, dtype=torch.float32) for sample in samples]
    old = list(scored.actor) if scored.actor is not None else engine
    ref = list(scored.ref) if scored.ref is not None else [None] * len(samples)
    rewards = [
        _penalised(sample, old_one, ref_one, algorithm)
        for sample, old_one, ref_one in zip(samples, old, ref, strict=True)
    ]
    advantages = _advantages(samples, rewards, algorithm, group)
    flat = [
        TrainSample(sample, advantage, old_one, ref_one)
        for sample, advantage, old_one, ref_one in zip(samples, advantages, old, ref, strict=True)
    ]
    return _by_step(shard, flat)


def placeholders(shard: TrainShard, algorithm: AlgorithmConfig) -> tuple[tuple[TrainSample, ...], ...]:
    """For pipeline stages before the last, which pass activations on and never see a loss."""
    flat = []
    for sample in shard.samples:
        nothing = torch.zeros(len(sample.response_ids))
        flat.append(TrainSample(sample, 0.0, nothing, nothing if algorithm.needs_ref else None))
    return _by_step(shard, flat)


def logprob_difference(
    samples: Sequence[Sample], scored: Sequence[Tensor], group: dist.ProcessGroup
) -> Mapping[str, float]:
    """Mean and maximum over all loss tokens of |log-prob here - log-prob of the engine|, over all ranks of `group`."""
    total, count, largest = 0.0, 0.0, 0.0
    for sample, own in zip(samples, scored, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        difference = (own - torch.tensor(sample.logprobs, dtype=torch.float32)).abs()[mask].double()
        total += float(difference.sum())
        count += float(difference.numel())
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
    everyone: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (total, count, largest), group=group)
    tokens = sum(n for _, n, _ in everyone)
    return {
        "rollout/train_engine_logprob_diff": sum(t for t, _, _ in everyone) / tokens if tokens else float("nan"),
        "rollout/train_engine_logprob_diff_max": max(m for _, _, m in everyone),
    }


def _penalised(sample: Sample, old: Tensor, ref: Tensor | None, algorithm: AlgorithmConfig) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.group_id}/{sample.index} has no reward and cannot be trained on")
    if ref is None:
        return sample.reward
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return penalised_reward(sample.reward, old, ref, mask, kl_coef=algorithm.kl_coef, estimator=algorithm.kl_estimator)


def _advantages(
    samples: Sequence[Sample], rewards: Sequence[float], algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> list[float]:
    own = [(sample.group_id, reward) for sample, reward in zip(samples, rewards, strict=True)]
    everyone: list[list[tuple[int, float]]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    before = sum(len(part) for part in everyone[: dist.get_rank(group)])
    flat = [pair for part in everyone for pair in part]
    advantages = group_relative(
        [reward for _, reward in flat],
        [group_id for group_id, _ in flat],
        normalize_by_std=algorithm.normalize_by_std,
    )
    return [float(a) for a in advantages[before : before + len(own)]]


def _by_step(shard: TrainShard, flat: Sequence[TrainSample]) -> tuple[tuple[TrainSample, ...], ...]:
    steps, start = [], 0
    for step in shard.steps:
        steps.append(tuple(flat[start : start + len(step.samples)]))
        start += len(step.samples)
    return tuple(steps)
