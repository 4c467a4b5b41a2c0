"""On-policy distillation: the reverse KL from the student to a teacher, on what the student itself generated.

Per token of a sample, `d = log student(token) - log teacher(token)` estimates KL(student, teacher) (Agarwal et al.,
arXiv 2306.13649; Thinking Machines, 'On-Policy Distillation', 2025). It is minimised in one of two ways:

    as advantage    `-coefficient x d` joins the advantage of each token; the policy gradient does the rest
    as loss         `coefficient x d^2 / 2` joins the loss; its expected gradient is that of the reverse KL
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.algorithms.kl import kl_per_token, masked_log_ratio


def distilled_advantages(
    advantage: float | Tensor, student: Tensor, teacher: Tensor, mask: Tensor, *, coefficient: float
) -> Tensor:
    """`advantage - coefficient x d` per token, float32 [response_len]; `advantage` alone where `mask` is 0.

    `student` are log-probs of the policy that generated the sample. Gets no gradient.
    """
    with torch.no_grad():
        return advantage - coefficient * masked_log_ratio(student, teacher, mask)


def distillation_loss(logprobs: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """`d^2 / 2` per token, in the shape of the arguments; gradient to `logprobs` only, 0 where `mask` is 0."""
    return kl_per_token(logprobs, teacher, mask, "k2")
