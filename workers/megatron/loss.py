"""The loss of some samples of an optimizer step: the algorithms, applied to what one micro-batch computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.algorithms.aggregate import StepTotals, token_weights, weighted_sum
from workers.algorithms.distillation import distillation_loss
from workers.algorithms.kl import kl_per_token
from workers.algorithms.policy_loss import clipped_policy_terms
from workers.batch import Sample
from workers.config import AlgorithmConfig
from workers.megatron.step_stats import Partial


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sample and what it is trained with. Tensors are float32 [response_len], on any device; none gets a gradient.

    `advantage` is one number for all tokens, or one per token.
    """

    sample: Sample
    advantage: float | Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None


def has_kl_term(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_kl_loss and algorithm.kl_loss_coef > 0


def has_distillation_term(algorithm: AlgorithmConfig) -> bool:
    return algorithm.use_opd and algorithm.opd_mode == "loss"


def check(samples: Sequence[TrainSample], algorithm: AlgorithmConfig) -> None:
    """Raises ValueError naming the sample whose scores do not fit its tokens, or are missing for a KL term."""
    for item in samples:
        name, length = f"sample {item.sample.group_id}/{item.sample.index}", len(item.sample.response_ids)
        scores: dict[str, object] = {"old_logprobs": item.old_logprobs}
        if item.ref_logprobs is not None:
            scores["ref_logprobs"] = item.ref_logprobs
        elif has_kl_term(algorithm):
            raise ValueError(f"{name} has no ref_logprobs, which the KL loss needs")
        if item.teacher_logprobs is not None:
            scores["teacher_logprobs"] = item.teacher_logprobs
        elif has_distillation_term(algorithm):
            raise ValueError(f"{name} has no teacher_logprobs, which distillation as a loss needs")
        if isinstance(item.advantage, Tensor):
            scores["advantage"] = item.advantage
        for what, values in scores.items():
            if not isinstance(values, Tensor) or tuple(values.shape) != (length,):
                raise ValueError(f"{name} has {length} response tokens, but its {what} is not a tensor of that length")


def evaluate(
    logprobs: Tensor,
    entropies: Tensor,
    samples: Sequence[TrainSample],
    totals: StepTotals,
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, Partial]:
    """The share of the step's loss that belongs to `samples`, with gradient to `logprobs` (and to `entropies`, where
    there is a bonus); and what is to be reported about it.

    `logprobs`, `entropies`: float32 [n], of all response tokens, sample after sample.

        loss = policy term + kl_loss_coef x KL + opd_kl_coef x distillation - entropy_coef x entropy

    each aggregated over tokens in the same way. A term whose coefficient is 0 is not computed into the loss, so that
    nothing of it can leak.
    """
    device = logprobs.device
    # Counted on the CPU, where counting makes nobody wait.
    masks = [torch.tensor(item.sample.loss_mask, dtype=torch.bool) for item in samples]
    mask = flat(masks, torch.bool, device)
    weights = token_weights(masks, algorithm.loss_aggregation, totals).to(device)
    terms = clipped_policy_terms(
        logprobs,
        flat([item.old_logprobs for item in samples], torch.float32, device),
        flat([_advantages(item, device) for item in samples], torch.float32, device),
        mask,
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
    )
    # Without samples the sum is over nothing, but keeps its place in the graph: every parameter gets a zero gradient.
    policy = weighted_sum(terms.loss, weights)
    total = policy
    kl_loss = torch.zeros((), device=device)
    if has_kl_term(algorithm):
        ref = flat([item.ref_logprobs for item in samples if item.ref_logprobs is not None], torch.float32, device)
        kl_loss = weighted_sum(kl_per_token(logprobs, ref, mask, algorithm.kl_estimator), weights)
        total = total + algorithm.kl_loss_coef * kl_loss
    if has_distillation_term(algorithm):
        teachers = [item.teacher_logprobs for item in samples if item.teacher_logprobs is not None]
        teacher = flat(teachers, torch.float32, device)
        total = total + algorithm.opd_kl_coef * weighted_sum(distillation_loss(logprobs, teacher, mask), weights)
    if algorithm.entropy_coef > 0:
        total = total - algorithm.entropy_coef * weighted_sum(entropies, weights)
    return total, Partial.measure(
        total.detach(), policy.detach(), kl_loss.detach(), entropies.detach(), terms, mask, masks
    )


def _advantages(item: TrainSample, device: torch.device) -> Tensor:
    if isinstance(item.advantage, Tensor):
        return item.advantage
    return torch.full((len(item.sample.response_ids),), item.advantage, device=device)


def flat(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One after the other, without gradient."""
    if not parts:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.cat([part.detach().to(device=device, dtype=dtype) for part in parts])
