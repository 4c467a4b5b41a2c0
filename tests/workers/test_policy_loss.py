"""The clipped objective: value, where the gradient stops, masks, fixed scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workers.algorithms.policy_loss import PolicyTerms, clipped_policy_terms


def terms(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor | None = None, **clip: float) -> PolicyTerms:
    mask = torch.ones(new.shape) if mask is None else mask
    return clipped_policy_terms(
        new, old, advantage, mask, eps_clip=clip.get("low", 0.2), eps_clip_high=clip.get("high")
    )


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_score_times_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.0])
    out = terms(new, new.detach().clone(), advantage)
    assert out.ratio.tolist() == [1.0, 1.0, 1.0]
    assert out.loss.tolist() == [-1.0, 2.0, 0.0]
    assert not out.clipped.any()
    out.loss.sum().backward()
    assert new.grad is not None
    assert torch.equal(new.grad, -advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.2, True),
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.1, 1.0, -1.1, False),
    ],
)
def test_clipping_is_pessimistic(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    out = terms(new, torch.zeros(1), torch.tensor([advantage]))
    assert float(out.loss.detach()) == pytest.approx(loss, abs=1e-6)
    assert bool(out.clipped) is clipped
    out.loss.sum().backward()
    assert new.grad is not None
    assert (float(new.grad) == 0.0) is clipped


def test_the_upper_bound_can_be_wider() -> None:
    new, old, up = torch.tensor([math.log(1.3)]), torch.zeros(1), torch.ones(1)
    assert bool(terms(new, old, up).clipped)
    assert not bool(terms(new, old, up, high=0.4).clipped)
    assert float(terms(torch.tensor([math.log(0.5)]), old, -up, high=0.4).loss) == pytest.approx(0.8)


def test_nan_and_inf_outside_the_mask_have_no_influence() -> None:
    new = torch.tensor([-1.0, math.nan, -3.0, -math.inf], requires_grad=True)
    old, advantage = torch.tensor([-1.2, -1.0, math.nan, math.inf]), torch.tensor([1.0, 1.0, math.nan, 2.0])
    out = terms(new, old, advantage, torch.tensor([1, 0, 0, 0]))
    clean = terms(torch.tensor([-1.0]), torch.tensor([-1.2]), torch.tensor([1.0]))
    assert out.loss.tolist() == [float(clean.loss), 0.0, 0.0, 0.0]
    assert out.ratio.tolist()[1:] == [1.0] * 3
    out.loss.sum().backward()
    assert new.grad is not None
    assert new.grad[1:].tolist() == [0.0] * 3


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(gap: float, advantage: float) -> None:
    new = torch.tensor([0.0], requires_grad=True)
    out = terms(new, torch.tensor([-gap]), torch.tensor([advantage]))
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


def test_no_gradient_reaches_old_logprobs_or_advantages() -> None:
    new, old, advantage = (torch.tensor([value], requires_grad=True) for value in (-1.0, -1.1, 0.7))
    terms(new, old, advantage).loss.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantage.grad is None


def test_reduced_precision_ratios_are_computed_in_float32() -> None:
    new, old = torch.tensor([-10.02]).bfloat16(), torch.tensor([-10.0]).bfloat16()
    ratio = terms(new, old, torch.ones(1)).ratio
    assert ratio.dtype == torch.float32
    assert float(ratio) == pytest.approx(float((new.float() - old.float()).exp()), abs=1e-3)
