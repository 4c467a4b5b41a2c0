"""From samples and scores to what is trained on: behaviour log-probs, penalised rewards, advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workers.algorithms.advantages import group_relative, penalised_reward
from workers.algorithms.distillation import distilled_advantages
from workers.batch import Sample, TrainShard
from workers.config import AlgorithmConfig
from workers.megatron.estimates import Targets, Values, estimate, gathered
from workers.megatron.loss import TrainSample


@dataclass(frozen=True, slots=True)
class Scored:
    """Per sample, in the order of the shard, float32 [response_len]: log-probs of the behaviour policy (None: the
    engine's are used), of the reference (None: no KL term) and of the teacher (None: no distillation)."""

    behaviour: Sequence[Tensor] | None = None
    ref: Sequence[Tensor] | None = None
    teacher: Sequence[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Experience:
    """What a policy is trained on in one rollout: one tuple per optimizer step, and metrics of the scores."""

    steps: tuple[tuple[TrainSample, ...], ...]
    metrics: dict[str, float]


def assemble(
    shard: TrainShard, scored: Scored, algorithm: AlgorithmConfig, group: dist.ProcessGroup, values: Values = None
) -> tuple[Experience, Targets | None]:
    """What to train the policy on; and the critic, where its `values` make the advantages.

    `group` holds the data-parallel ranks: rewards are gathered over it, since members of one prompt's group may be
    trained on different ranks. All of its ranks call this together.
    """
    samples = shard.samples
    _check_rewards(samples)
    metrics: dict[str, float] = {}
    engine = [torch.tensor(sample.logprobs, dtype=torch.float32) for sample in samples]
    old = list(scored.behaviour) if scored.behaviour is not None else engine
    if scored.behaviour is not None:
        metrics |= logprob_difference(samples, scored.behaviour, group)
    ref = list(scored.ref) if scored.ref is not None else [None] * len(samples)
    advantages: Sequence[float | Tensor]
    targets = None
    if algorithm.needs_critic:
        advantages, targets = estimate(samples, values, old, ref, algorithm, group)
    else:
        advantages = _advantages(samples, _penalised(samples, old, ref, algorithm), algorithm, group)
    teacher = list(scored.teacher) if scored.teacher is not None else [None] * len(samples)
    if scored.teacher is not None:
        gaps = [own - taught for own, taught in zip(old, scored.teacher, strict=True)]
        metrics["train/opd_reverse_kl"] = _over_tokens(samples, gaps, group).mean
        if algorithm.opd_mode == "advantage":
            advantages = _distilled(samples, advantages, old, scored.teacher, algorithm.opd_kl_coef)
    flat = [TrainSample(*parts) for parts in zip(samples, advantages, old, ref, teacher, strict=True)]
    return Experience(_by_step(shard, flat), metrics), targets


def placeholders(shard: TrainShard, algorithm: AlgorithmConfig) -> Experience:
    """For pipeline stages before the last, which pass activations on and never see a loss."""
    flat = []
    for sample in shard.samples:
        nothing = torch.zeros(len(sample.response_ids))
        ref, teacher = nothing if algorithm.needs_ref else None, nothing if algorithm.use_opd else None
        flat.append(TrainSample(sample, 0.0, nothing, ref, teacher))
    return Experience(_by_step(shard, flat), {})


def logprob_difference(
    samples: Sequence[Sample], scored: Sequence[Tensor], group: dist.ProcessGroup
) -> Mapping[str, float]:
    """Mean and maximum over all loss tokens of |log-prob here - log-prob of the engine|, over all ranks of `group`."""
    engine = [torch.tensor(sample.logprobs, dtype=torch.float32) for sample in samples]
    gaps = [(own - theirs).abs() for own, theirs in zip(scored, engine, strict=True)]
    over = _over_tokens(samples, gaps, group)
    return {
        "rollout/train_engine_logprob_diff": over.mean,
        "rollout/train_engine_logprob_diff_max": over.largest,
    }


@dataclass(frozen=True, slots=True)
class _Over:
    mean: float
    largest: float


def _over_tokens(samples: Sequence[Sample], values: Sequence[Tensor], group: dist.ProcessGroup) -> _Over:
    """Of `values` ([response_len] per sample), over the loss tokens of all ranks of `group`."""
    masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in samples]
    counted = torch.cat([torch.zeros(0), *(v[mask] for v, mask in zip(values, masks, strict=True))]).double()
    own = (float(counted.sum()), float(counted.numel()), float(counted.max()) if counted.numel() else -math.inf)
    everyone = gathered(own, group)
    tokens = sum(n for _, n, _ in everyone)
    if not tokens:
        return _Over(math.nan, math.nan)
    return _Over(sum(total for total, _, _ in everyone) / tokens, max(largest for _, _, largest in everyone))


def _distilled(
    samples: Sequence[Sample],
    advantages: Sequence[float | Tensor],
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    coefficient: float,
) -> list[float | Tensor]:
    return [
        distilled_advantages(one, own, taught, torch.tensor(sample.loss_mask), coefficient=coefficient)
        for sample, one, own, taught in zip(samples, advantages, student, teacher, strict=True)
    ]


def _check_rewards(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.reward is None:
            raise ValueError(f"sample {sample.group_id}/{sample.index} has no reward and cannot be trained on")


def _penalised(
    samples: Sequence[Sample], old: Sequence[Tensor], ref: Sequence[Tensor | None], algorithm: AlgorithmConfig
) -> list[float]:
    rewards = []
    for sample, old_one, ref_one in zip(samples, old, ref, strict=True):
        assert sample.reward is not None
        mask, reward = torch.tensor(sample.loss_mask, dtype=torch.bool), sample.reward
        if ref_one is not None:
            coefficient, kind = algorithm.kl_coef, algorithm.kl_estimator
            reward = penalised_reward(reward, old_one, ref_one, mask, kl_coef=coefficient, estimator=kind)
        rewards.append(reward)
    return rewards


def _advantages(
    samples: Sequence[Sample], rewards: Sequence[float], algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> list[float]:
    if algorithm.advantage_estimator == "on_policy_distillation":
        return [0.0] * len(samples)
    own = [(sample.group_id, reward) for sample, reward in zip(samples, rewards, strict=True)]
    everyone = gathered(own, group)
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
