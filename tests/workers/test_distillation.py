"""Distillation minimises the reverse KL: that is what its gradient is, over everything a student could say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.algorithms.distillation import distillation_loss, distilled_advantages
from workers.algorithms.policy_loss import clipped_policy_terms

VOCABULARY = 7


def student_and_teacher() -> tuple[Tensor, Tensor]:
    """Logits with gradient, and log-probs."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=generator, requires_grad=True)
    return logits, torch.randn(VOCABULARY, generator=generator).log_softmax(0)


def gradient_of_the_kl(coefficient: float) -> Tensor:
    logits, teacher = student_and_teacher()
    logprobs = logits.log_softmax(0)
    (coefficient * (logprobs.exp() * (logprobs - teacher)).sum()).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_as_advantage_its_expected_gradient_is_that_of_the_reverse_kl(coefficient: float) -> None:
    logits, teacher = student_and_teacher()
    logprobs, mask = logits.log_softmax(0), torch.ones(VOCABULARY)
    advantages = distilled_advantages(0.0, logprobs, teacher, mask, coefficient=coefficient)
    assert not advantages.requires_grad
    terms = clipped_policy_terms(logprobs, logprobs.detach(), advantages, mask, eps_clip=0.2)
    (logprobs.detach().exp() * terms.loss).sum().backward()
    assert torch.allclose(logits.grad, gradient_of_the_kl(coefficient), atol=1e-6)


def test_as_loss_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    logits, teacher = student_and_teacher()
    logprobs = logits.log_softmax(0)
    loss = distillation_loss(logprobs, teacher, torch.ones(VOCABULARY))
    (logprobs.detach().exp() * loss).sum().backward()
    assert torch.allclose(logits.grad, gradient_of_the_kl(1.0), atol=1e-6)


def test_it_joins_the_advantage_of_the_reward() -> None:
    student, teacher = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.0, -1.0])
    mask = torch.tensor([1, 1, 1])
    assert distilled_advantages(0.5, student, teacher, mask, coefficient=0.1).tolist() == pytest.approx([0.4, 0.5, 0.7])


def test_what_is_masked_counts_for_nothing_whatever_stands_there() -> None:
    student = torch.tensor([-1.0, torch.nan], requires_grad=True)
    teacher, mask = torch.tensor([-3.0, torch.inf]), torch.tensor([1, 0])
    assert distilled_advantages(0.5, student, teacher, mask, coefficient=1.0).tolist() == [-1.5, 0.5]
    loss = distillation_loss(student, teacher, mask)
    loss.sum().backward()
    assert loss.tolist() == [2.0, 0.0]
    assert student.grad is not None
    assert student.grad.tolist() == [2.0, 0.0]


def test_it_is_finite_where_the_teacher_never_would_have_said_that() -> None:
    student, teacher = torch.tensor([-0.1]), torch.tensor([-300.0])
    assert distilled_advantages(0.0, student, teacher, torch.ones(1), coefficient=1.0).isfinite().all()
    assert distillation_loss(student, teacher, torch.ones(1)).isfinite().all()
