"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class VocabSplit:
    """Which columns of the vocabulary stand here: rank `rank` of `group`, equal parts, of which the columns from
    `vocab_size` on are padding and belong to no token."""

    group: dist.ProcessGroup
    rank: int
    vocab_size: int


def token_logprobs(
    logits: Tensor, targets: Tensor, split: VocabSplit, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of each distribution, over the true vocabulary: float32 [n].

    `logits` [n, columns of this rank], any float dtype, already divided by the temperature; `targets` int64 [n], the
    same on all ranks of the split. Computed in float32. Both results have a gradient to `logits`; the entropy only
    where `entropy_gradient`, so that a bonus nobody asked for costs no backward pass and leaks nothing.
    """
    columns = logits.shape[-1]
    first = split.rank * columns
    scores = logits.float()
    if first + columns > split.vocab_size:
        padding = torch.arange(first, first + columns, device=logits.device) >= split.vocab_size
        scores = scores.masked_fill(padding, -torch.inf)
    results: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        scores, targets, first, split.group, entropy_gradient
    )
    return results


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = one-hot - p;  d entropy / d logits = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        def reduce(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
            # All ranks of the split have the same tokens, so they skip the empty case together.
            if x.numel() and dist.get_world_size(group) > 1:
                dist.all_reduce(x, op=op, group=group)
            return x

        shifted = scores - reduce(scores.amax(dim=-1), dist.ReduceOp.MAX).unsqueeze(-1)
        log_z = reduce(shifted.exp().sum(dim=-1)).log()
        log_p = shifted - log_z.unsqueeze(-1)
        local = targets - first
        here = (local >= 0) & (local < scores.shape[-1])
        column = torch.where(here, local, 0).unsqueeze(-1)
        logprobs = reduce(torch.where(here, log_p.gather(-1, column).squeeze(-1), 0.0))
        p = log_p.exp()
        entropies = reduce(-torch.where(p > 0, p * log_p, 0.0).sum(dim=-1))
        ctx.save_for_backward(log_p, here, column, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        log_p, here, column, entropies = ctx.saved_tensors
        p = log_p.exp()
        of_logprob = gradients[0].unsqueeze(-1)
        result = -p * of_logprob
        result.scatter_add_(-1, column, of_logprob * here.unsqueeze(-1))
        if ctx.entropy_gradient:
            slope = torch.where(p > 0, p * (log_p + entropies.unsqueeze(-1)), 0.0)
            result -= slope * gradients[1].unsqueeze(-1)
        return result, None, None, None, None
