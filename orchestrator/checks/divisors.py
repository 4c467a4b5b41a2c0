"""Divisors of numbers of any size, in bounded time."""

from __future__ import annotations

from itertools import takewhile

_TRIED = 100_000
_SHOWN = 16


def divisors(number: int) -> list[int]:
    """Those of `number` (at least 1) that are at most 100 000, and what they divide it into; ascending. These are all
    where it is below 10^10."""
    small = [n for n in takewhile(lambda n: n * n <= number, range(1, _TRIED + 1)) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def listed(values: list[int]) -> str:
    """Ascending numbers for an error message; of many the first and the last."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= _SHOWN else [*shown[:8], "...", *shown[-7:]])
