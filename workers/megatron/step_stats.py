"""What is reported about an optimizer step: sums and counts, added up over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.algorithms.policy_loss import PolicyTerms
from workers.megatron.optimizer import StepOutcome


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step over all ranks.

    `loss`, `pg_loss`, `kl_loss` are those of the whole step: what was backpropagated, and its parts before their
    coefficients; `kl_loss` is None where the loss has no KL term. `*_sum` are over the `tokens` that count, of
    `sequences` samples with at least one such token; `masked_sequences` had none. `ratio_max`, `ratio_min` are 1
    without tokens. `skipped`: no parameter changed, because of a gradient that is not finite (then `grad_norm` is not
    either) or because no token counted. `lr` is the one used, or that would have been.
    """

    loss: float
    pg_loss: float
    kl_loss: float | None
    entropy_sum: float
    ratio_sum: float
    ratio_max: float
    ratio_min: float
    clipped: int
    tokens: int
    sequences: int
    masked_sequences: int
    micro_batches: int
    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class Partial:
    """The same about one micro-batch, as float64 tensors where it was computed: no copy waits for the device."""

    sums: Tensor
    extremes: Tensor

    @staticmethod
    def measure(
        loss: Tensor,
        pg_loss: Tensor,
        kl_loss: Tensor,
        entropies: Tensor,
        terms: PolicyTerms,
        mask: Tensor,
        masks: Sequence[Tensor],
    ) -> Partial:
        """`mask`: all `masks` (on the CPU) one after the other; entropies and terms are in that order too."""
        counted = mask.double()
        nothing = torch.zeros((), dtype=torch.float64, device=mask.device)
        with_tokens = sum(bool(one.any()) for one in masks)
        ratio = terms.ratio.double()
        sums = torch.stack(
            [
                loss.double(),
                pg_loss.double(),
                kl_loss.double(),
                torch.where(mask, entropies.double(), nothing).sum(),
                (ratio * counted).sum(),
                terms.clipped.double().sum(),
                counted.sum(),
                nothing + with_tokens,
                nothing + (len(masks) - with_tokens),
                nothing + 1,
            ]
        )
        one = nothing.reshape(1) + 1
        # Ratios of masked tokens are 1.
        extremes = torch.stack([torch.cat([ratio, one]).max(), torch.cat([-ratio, -one]).max()])
        return Partial(sums, extremes)


def reduce(parts: Sequence[Partial], outcome: StepOutcome, *, measures_kl: bool, device: torch.device) -> StepStats:
    """Add up over micro-batches, then over data-parallel ranks of the last stage, and tell all stages. Every rank of
    the gang calls it; stages that are not the last have no parts."""
    sums = torch.zeros(10, dtype=torch.float64, device=device)
    extremes = torch.tensor([1.0, -1.0], dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage():
        sums = sums + torch.stack([part.sums for part in parts]).sum(dim=0)
        extremes = torch.stack([part.extremes for part in parts]).amax(dim=0)
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    (
        loss, pg_loss, kl_loss, entropy, ratio, clipped, tokens, sequences, masked, micro_batches, highest, lowest
    ) = tell_all_stages(torch.cat([sums, extremes]))  # fmt: skip
    return StepStats(
        loss=loss,
        pg_loss=pg_loss,
        kl_loss=kl_loss if measures_kl else None,
        entropy_sum=entropy,
        ratio_sum=ratio,
        ratio_max=highest,
        ratio_min=-lowest,
        clipped=int(clipped),
        tokens=int(tokens),
        sequences=int(sequences),
        masked_sequences=int(masked),
        micro_batches=int(micro_batches),
        **dataclasses.asdict(outcome),
    )


def tell_all_stages(values: Tensor) -> list[float]:
    """`values` of the last pipeline stage, on every stage; all of them call it together."""
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    told: list[float] = values.tolist()
    return told


def nothing_to_learn(lr: float) -> StepStats:
    """A step of which no token counts: known from its totals, so that all ranks skip it without a word."""
    return StepStats(
        loss=0.0,
        pg_loss=0.0,
        kl_loss=None,
        entropy_sum=0.0,
        ratio_sum=0.0,
        ratio_max=1.0,
        ratio_min=1.0,
        clipped=0,
        tokens=0,
        sequences=0,
        masked_sequences=0,
        micro_batches=0,
        grad_norm=0.0,
        lr=lr,
        skipped=True,
    )


def summary(stats: list[StepStats]) -> dict[str, float]:
    """Metrics of one rollout: sums over its optimizer steps divided by counts; means of losses over steps taken."""
    tokens = sum(s.tokens for s in stats)
    per_token = {
        "train/entropy": sum(s.entropy_sum for s in stats),
        "train/ratio_mean": sum(s.ratio_sum for s in stats),
        "train/clip_fraction": float(sum(s.clipped for s in stats)),
    }
    taken = [s for s in stats if not s.skipped]
    per_step = {
        "train/loss": [s.loss for s in taken],
        "train/pg_loss": [s.pg_loss for s in taken],
        "train/kl_loss": [s.kl_loss for s in taken if s.kl_loss is not None],
        "train/grad_norm": [s.grad_norm for s in taken],
    }
    return {
        **{name: value / tokens if tokens else float("nan") for name, value in per_token.items()},
        **{name: sum(values) / len(values) for name, values in per_step.items() if values},
        "train/lr": stats[-1].lr,
        "train/tokens": float(tokens),
        "train/skipped_steps": float(len(stats) - len(taken)),
        "train/masked_sequences": float(sum(s.masked_sequences for s in stats)),
    }
