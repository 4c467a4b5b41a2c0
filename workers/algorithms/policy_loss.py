"""The clipped policy-gradient objective, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.algorithms.kl import masked_log_ratio


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """All in the shape of the log-probs, float32 (`clipped`: bool). `loss` carries the gradient, the rest none.

    Where the mask is 0: `loss` 0, `ratio` 1, `clipped` false.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_policy_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> PolicyTerms:
    """`-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)` with `r = exp(logprobs - old_logprobs)`.

    References: PPO, arXiv 1707.06347, equation 7; the wider upper bound: DAPO, arXiv 2503.14476. `clipped` marks tokens
    where the bound took effect, so that they give no gradient. Old log-probs and advantages get no gradient. Values
    at masked positions have no influence, even NaN.
    """
    upper = eps_clip if eps_clip_high is None else eps_clip_high
    keep = mask.bool()
    ratio = masked_log_ratio(logprobs, old_logprobs, mask).exp()
    advantage = torch.where(keep, advantages.detach().float(), torch.zeros((), device=logprobs.device))
    free, bounded = -ratio * advantage, -ratio.clamp(1.0 - eps_clip, 1.0 + upper) * advantage
    return PolicyTerms(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())
