"""The weight that a digest gives to a position: `mix`, an odd-valued 64-bit mixer of indices.

    mix(index) = splitmix(index // RUN) x splitmix(~(index mod RUN))        (mod 2^64)

Both factors are odd, so the product is. That it is a product is what makes it cheap: over a run of RUN positions the
first factor is one number and the second a table, and each element costs one multiplication.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

RUN_BITS = 10
RUN = 1 << RUN_BITS


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def splitmix(x: Tensor) -> Tensor:
    """Odd-valued 64-bit mixer of an int64 tensor; wraps mod 2^64. Reference: splitmix64's finalizer, lowest bit set."""
    z = x + _signed(0x9E3779B97F4A7C15)  # a tensor of our own: from here on in place, for the caches' sake
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift_right(z, 31)).bitwise_or_(1)


def mix(index: Tensor) -> Tensor:
    """The weight of each position; int64, `index` not negative."""
    return splitmix(index >> RUN_BITS).mul_(splitmix(~(index & (RUN - 1))))


@cache
def within_run(device: torch.device) -> Tensor:
    """int64 [RUN]: the factor of each position in its run. One tensor for all; read only."""
    return splitmix(~torch.arange(RUN, dtype=torch.int64, device=device))
