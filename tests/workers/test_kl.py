"""KL estimates: value, gradient, masks, extreme ratios."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from workers.algorithms.kl import KlEstimator, kl_per_token

ESTIMATORS = get_args(KlEstimator)


def test_values_against_the_formulas() -> None:
    new, ref, mask = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.ones(2)
    assert kl_per_token(new, ref, mask, "k1").tolist() == [0.5, -1.0]
    assert kl_per_token(new, ref, mask, "k2").tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert kl_per_token(new, ref, mask, "k3").tolist() == pytest.approx(expected, rel=1e-6)


def test_estimates_average_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 16, generator=generator) * 0.3
    p, q = logits.log_softmax(-1)
    true = float((p.exp() * (p - q)).sum())
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    for estimator, tolerance in (("k1", 0.01), ("k2", 0.02), ("k3", 0.005)):
        mean = kl_per_token(p[tokens], q[tokens], torch.ones(tokens.shape), estimator).mean()  # type: ignore[arg-type]
        assert float(mean) == pytest.approx(true, abs=tolerance)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_equals_finite_differences_and_masked_tokens_have_none(estimator: KlEstimator) -> None:
    new = torch.tensor([-1.0, -2.0, -0.3, -4.0], requires_grad=True)
    ref, mask = torch.tensor([-1.5, -1.0, -0.3, -2.0]), torch.tensor([1, 1, 1, 0])
    kl_per_token(new, ref, mask, estimator).sum().backward()
    assert new.grad is not None
    step = 1e-2
    for i in range(4):
        bump = torch.zeros(4)
        bump[i] = step
        up = kl_per_token(new.detach() + bump, ref, mask, estimator).sum()
        down = kl_per_token(new.detach() - bump, ref, mask, estimator).sum()
        assert float(new.grad[i]) == pytest.approx(float(up - down) / (2 * step), abs=2e-4)
    assert new.grad[3] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [200.0, -200.0, math.inf, -math.inf])
def test_extreme_ratios_stay_finite(estimator: KlEstimator, gap: float) -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    kl = kl_per_token(new, new.detach() - gap, torch.ones(1), estimator)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nan_outside_the_mask_has_no_influence(estimator: KlEstimator) -> None:
    new = torch.tensor([-1.0, math.nan, -2.0, -3.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, math.nan, math.inf])
    kl = kl_per_token(new, ref, torch.tensor([1, 0, 0, 0]), estimator)
    kl.sum().backward()
    assert kl[1:].tolist() == [0.0] * 3
    assert new.grad is not None
    assert new.grad[1:].tolist() == [0.0] * 3


def test_no_gradient_reaches_the_reference() -> None:
    new, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    kl_per_token(new, ref, torch.ones(1), "k3").sum().backward()
    assert ref.grad is None


def test_reduced_precision_is_computed_in_float32() -> None:
    new, ref = torch.tensor([-1.03, -2.5]), torch.tensor([-1.02, -2.0])
    low_new, low_ref = new.bfloat16(), ref.bfloat16()
    for estimator in ESTIMATORS:
        low = kl_per_token(low_new, low_ref, torch.ones(2), estimator)
        assert low.dtype == torch.float32
        assert torch.allclose(low, kl_per_token(low_new.float(), low_ref.float(), torch.ones(2), estimator), atol=1e-3)


def test_arguments_are_left_alone() -> None:
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-30.0, -1.0])
    before = new.clone(), ref.clone()
    kl_per_token(new, ref, torch.ones(2), "k3")
    assert torch.equal(new, before[0])
    assert torch.equal(ref, before[1])
