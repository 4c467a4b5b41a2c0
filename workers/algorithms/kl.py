"""Estimates of the KL divergence from samples (Schulman, 'Approximating KL Divergence', 2020).

With `d = log pi(token) - log ref(token)` of tokens drawn from pi:

    k1 = d                     unbiased, high variance, can be negative
    k2 = d^2 / 2               biased, never negative
    k3 = exp(-d) - 1 + d       unbiased, never negative

As a *loss* their gradients differ from what their values suggest. The expected gradient of k1 is zero (it is the
score function), so k1 is of use as a penalty on the reward or as a metric only. The expected gradient of k2 is that of
KL(pi, ref), and that of k3 is the gradient of KL(ref, pi).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this: exp of it is finite in float32, and a token beyond it gives no gradient."""


def masked_log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """`logprobs - other` in float32, held within the limit, 0 where `mask` is 0 whatever stands there (NaN, inf).

    Gradient flows to `logprobs` only. The selection comes before any arithmetic: a NaN multiplied by 0 is NaN, in the
    value and in the gradient.
    """
    keep = mask.bool()
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    new = torch.where(keep, logprobs.float(), zero)
    fixed = torch.where(keep, other.detach().float(), zero)
    return (new - fixed).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate per token, float32, in the shape of the arguments; exactly 0 where `mask` is 0.

    `ref_logprobs` gets no gradient. Finite for any log-ratio.
    """
    d = masked_log_ratio(logprobs, ref_logprobs, mask)
    match estimator:
        case "k1":
            return d
        case "k2":
            return 0.5 * d * d
        case "k3":
            return torch.expm1(-d) + d
