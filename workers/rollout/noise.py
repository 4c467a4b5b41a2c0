"""Noise that is a pure function of (seed of a sample, position, token id).

Adding standard Gumbel noise to log-probs and taking the largest draws from their distribution. Imports torch and
`state.mixing` alone, so that it runs inside an engine's process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from state.mixing import splitmix


def uniform_noise(seeds: Tensor, position: int | Tensor, num_tokens: int) -> Tensor:
    """float64 [len(seeds), num_tokens] in (0, 1): the upper 53 bits of a mix of (seed, position, token id)."""
    key = splitmix(splitmix(seeds) + position)
    bits = splitmix(key.unsqueeze(-1) + torch.arange(num_tokens, dtype=torch.int64, device=seeds.device))
    upper = (bits >> 11) & ((1 << 53) - 1)
    return (upper.to(torch.float64) * 2.0**-53).clamp_(min=2.0**-54)


def gumbel_noise(seeds: Tensor, position: int | Tensor, num_tokens: int) -> Tensor:
    """float64 [len(seeds), num_tokens], standard Gumbel."""
    return -(-uniform_noise(seeds, position, num_tokens).log()).log()
