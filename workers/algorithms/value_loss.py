"""What a critic learns from: its squared distance to the returns, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """In the shape of the values, float32 (`clipped`: bool); 0 and false where the mask is 0. `loss` carries the
    gradient."""

    loss: Tensor
    clipped: Tensor


def value_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float | None
) -> ValueTerms:
    """`max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2`, without the second where
    `value_clip` is None.

    The value term of PPO (Schulman et al., arXiv 1707.06347, equation 9), with the clip of its authors' code: a value
    that has moved further than that since the rollout gives no gradient, where moving on would lower the loss.
    `clipped` marks those. Old values and returns get no gradient; values at masked positions have no influence, even
    NaN.
    """
    keep = mask.bool()
    zero = torch.zeros((), dtype=torch.float32, device=values.device)
    new = torch.where(keep, values.float(), zero)
    old = torch.where(keep, old_values.detach().float(), zero)
    target = torch.where(keep, returns.detach().float(), zero)
    free = (new - target).square()
    if value_clip is None:
        return ValueTerms(free / 2, torch.zeros_like(keep))
    bounded = (torch.minimum(torch.maximum(new, old - value_clip), old + value_clip) - target).square()
    return ValueTerms(torch.maximum(free, bounded) / 2, (bounded > free).detach())
