"""From per-token losses to one number, so that no split of a step over micro-batches and ranks changes it.

Each aggregation is a fixed weight per token that depends only on the token's own sequence and on totals of the *whole*
optimizer step. The loss of a part is the weighted sum over its tokens; losses of parts add up to the loss of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Over all samples of one optimizer step, on all ranks.

    `tokens`: loss tokens. `sequences`: samples with at least one loss token. `max_response_len`: the longest response
    that the sampler may return; it is the constant of `constant`.
    """

    tokens: int
    sequences: int
    max_response_len: int

    @property
    def is_empty(self) -> bool:
        """Nothing to learn from: every token of the step is masked."""
        return self.tokens == 0


def token_weights(masks: Sequence[Tensor], aggregation: Aggregation, totals: StepTotals) -> Tensor:
    """Weights of all tokens of some of a step's sequences, one after the other: float32 [sum of lengths].

    `masks`: one 1-d mask per sequence. With s for a sequence:
    `token_mean`: 1 / totals.tokens (DAPO, arXiv 2503.14476);
    `sequence_mean`: 1 / (loss tokens of s x totals.sequences) (GRPO, arXiv 2402.03300);
    `constant`: 1 / (totals.sequences x totals.max_response_len) (Dr. GRPO, arXiv 2503.20783).
    Masked tokens weigh exactly 0; a sequence without loss tokens, or without tokens, contributes nothing.
    """
    if not masks:
        return torch.zeros(0)
    flat = torch.cat([mask.bool() for mask in masks])
    if totals.is_empty:
        return torch.zeros(flat.shape, device=flat.device)
    match aggregation:
        case "token_mean":
            weights = torch.full(flat.shape, 1.0 / totals.tokens, device=flat.device)
        case "constant":
            share = 1.0 / (totals.sequences * totals.max_response_len)
            weights = torch.full(flat.shape, share, device=flat.device)
        case "sequence_mean":
            shares = [1.0 / (max(1, int(mask.bool().sum())) * totals.sequences) for mask in masks]
            lengths = torch.tensor([mask.numel() for mask in masks], device=flat.device)
            weights = torch.tensor(shares, device=flat.device).repeat_interleave(lengths)
    return torch.where(flat, weights, torch.zeros((), device=flat.device))


def weighted_sum(per_token: Tensor, weights: Tensor) -> Tensor:
    """Sum of `per_token x weights` over tokens that weigh something; others have no influence, even NaN."""
    used = weights > 0
    return (torch.where(used, per_token, torch.zeros((), device=per_token.device)) * weights).sum()
