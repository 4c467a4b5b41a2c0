"""Which tensors hold a value that is no number, whatever their dtypes and wherever they stand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from state.digest import Piece
from state.digest_records import Region
from state.finite import not_finite

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pieces(device: str) -> list[Piece]:
    held: dict[str, Tensor] = {
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "single": torch.ones(7),
        "strided": torch.ones(4, 6, dtype=torch.bfloat16)[:, ::2],
        "empty": torch.ones(0, 4),
        "counter": torch.tensor([2**60]),
        "scalar": torch.tensor(1.0),
    }
    return [Piece(n, Region.whole(t.shape), t.to(device)) for n, t in held.items()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_value_anywhere_is_found_and_its_tensor_named(device: str, value: float) -> None:
    assert not_finite(pieces(device)) == ()
    for name in ("half", "single", "strided", "scalar"):
        held = pieces(device)
        tensor = next(piece.tensor for piece in held if piece.name == name)
        tensor[tuple(size - 1 for size in tensor.shape)] = value
        assert not_finite(held) == (name,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_numbers_are_finite(device: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest, -largest, torch.finfo(dtype).tiny], dtype=dtype, device=device)
    assert not_finite([Piece("large", Region.whole(tensor.shape), tensor)]) == ()
