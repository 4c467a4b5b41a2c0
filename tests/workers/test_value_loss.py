"""The critic's loss: half a squared distance, and a clip that only ever makes it larger."""

from __future__ import annotations

import pytest
import torch

from workers.algorithms.value_loss import value_terms

NAN = float("nan")


def by_hand(value: float, old: float, target: float, clip: float | None) -> float:
    free = (value - target) ** 2
    if clip is None:
        return free / 2
    near = min(max(value, old - clip), old + clip)
    return max(free, (near - target) ** 2) / 2


@pytest.mark.parametrize("clip", [None, 0.1, 0.5, 10.0])
def test_it_is_half_the_larger_squared_distance(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(40, generator=generator) for _ in range(3))
    found = value_terms(values, old, returns, torch.ones(40), value_clip=clip)
    triples = zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)
    assert found.loss.tolist() == pytest.approx([by_hand(*three, clip) for three in triples], abs=1e-5)


def test_a_value_beyond_the_clip_is_pulled_back_but_never_pushed_on() -> None:
    # Far above its old value, and below or above the return: only the second may move it.
    values = torch.tensor([2.0, 2.0, 0.1], requires_grad=True)
    old, returns = torch.zeros(3), torch.tensor([3.0, -1.0, 1.0])
    found = value_terms(values, old, returns, torch.ones(3), value_clip=0.5)
    assert found.clipped.tolist() == [True, False, False]
    found.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 3.0, -0.9])


@pytest.mark.parametrize("clip", [None, 0.2])
def test_what_is_masked_counts_for_nothing_whatever_stands_there(clip: float | None) -> None:
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    old, returns = torch.tensor([NAN, NAN, 2.9]), torch.tensor([0.0, torch.inf, 1.0])
    found = value_terms(values, old, returns, torch.tensor([0, 0, 1]), value_clip=clip)
    assert found.loss[:2].tolist() == [0.0, 0.0]
    found.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, 2.0])


def test_old_values_and_returns_get_no_gradient() -> None:
    values, old, returns = (torch.ones(2, requires_grad=True) for _ in range(3))
    value_terms(values, old, returns, torch.ones(2), value_clip=0.1).loss.sum().backward()
    assert (old.grad, returns.grad) == (None, None)
