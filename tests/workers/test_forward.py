"""Scores and optimizer steps: the same on every layout and for every split of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.gang_processes import Place, gloo, run_gang
from tests.workers.train_jobs import (
    BUDGETS,
    TEMPERATURE,
    Setting,
    Step,
    farthest,
    gang,
    make_sample,
    make_samples,
    make_trainee,
    no_distributed_optimizer,
    one_step,
    parameters,
    totals_of,
    whole,
    with_targets,
)
from workers.algorithms.aggregate import Aggregation, StepTotals
from workers.config import AlgorithmConfig
from workers.megatron import loss
from workers.megatron.forward import score, train_step
from workers.megatron.loss import TrainSample
from workers.megatron.vocab_parallel import VocabSplit, token_logprobs

HERE = "tests.workers.test_forward"
JOBS = "tests.workers.train_jobs"
PLAIN = no_distributed_optimizer(Setting())
WITH_KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)

SAMPLES = make_samples()
TARGETS = with_targets(SAMPLES)
TOTALS = totals_of(SAMPLES)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def case(
    shares: Sequence[Sequence[TrainSample]], budget: int = 64, aggregation: Aggregation = "token_mean", **options: Any
) -> tuple[Any, ...]:
    return shares, TOTALS, WITH_KL.model_copy(update={"loss_aggregation": aggregation, **options}), budget


def run_cases(world_size: int, setting: Setting, cases: Sequence[tuple[Any, ...]]) -> list[list[Step]]:
    """For each case the steps of all ranks."""
    ranks = run_gang(f"{JOBS}:step_once_per_case", world_size, (setting, cases))
    return [list(steps) for steps in zip(*ranks, strict=True)]


def gradients_of(steps: Sequence[Step]) -> dict[str, Tensor]:
    return whole([step.gradients for step in steps])


def parameters_of(steps: Sequence[Step]) -> dict[str, Tensor]:
    return whole([step.parameters for step in steps])


@pytest.fixture(scope="module")
def reference() -> dict[str, list[Step]]:
    """One rank, one micro-batch, for each aggregation."""
    steps = run_cases(1, PLAIN, [case([TARGETS], BUDGETS[8,], a) for a in AGGREGATIONS])
    return dict(zip(AGGREGATIONS, steps, strict=True))


def assert_same_step(steps: Sequence[Step], expected: Sequence[Step], *, gradients: bool) -> None:
    assert farthest(parameters_of(steps), parameters_of(expected)) < 1e-6
    if gradients:
        assert farthest(gradients_of(steps), gradients_of(expected)) < 1e-6
    for step in steps:
        assert step.writes == 1
        assert step.mismatches == []
        for name in ("loss", "pg_loss", "kl_loss", "entropy_sum", "ratio_sum", "grad_norm"):
            value = getattr(expected[0].stats, name)
            assert getattr(step.stats, name) == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert (step.stats.tokens, step.stats.sequences) == (TOTALS.tokens, TOTALS.sequences)


def test_any_split_into_micro_batches_gives_the_same_step(reference: dict[str, list[Step]]) -> None:
    grid = list(itertools.product(AGGREGATIONS, BUDGETS.items()))
    results = run_cases(1, PLAIN, [case([TARGETS], budget, a) for a, (_, budget) in grid])
    for (aggregation, (sizes, _)), steps in zip(grid, results, strict=True):
        assert steps[0].stats.micro_batches == len(sizes)
        assert_same_step(steps, reference[aggregation], gradients=True)


@pytest.mark.parametrize("setting", [PLAIN, Setting()], ids=["plain", "distributed"])
def test_any_split_over_data_parallel_ranks_gives_the_same_step(
    setting: Setting, reference: dict[str, list[Step]]
) -> None:
    shares = [(TARGETS[:5], TARGETS[5:]), (TARGETS, []), ([], TARGETS), (TARGETS[::2], TARGETS[1::2])]
    grid = list(itertools.product(AGGREGATIONS, shares))
    results = run_cases(2, setting, [case(share, 30, a) for a, share in grid])
    for (aggregation, _), steps in zip(grid, results, strict=True):
        plain = not setting.train.use_distributed_optimizer
        assert_same_step(steps, reference[aggregation], gradients=plain)
        assert steps[0].stats == steps[1].stats
        assert steps[0].stats.micro_batches > 2


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_tensor_and_pipeline_parallel_ranks_take_the_same_step(
    sizes: dict[str, int], reference: dict[str, list[Step]]
) -> None:
    setting = replace(PLAIN, **sizes)
    grid = list(itertools.product(AGGREGATIONS, [BUDGETS[8,], BUDGETS[5, 3], BUDGETS[(1,) * 8]]))
    results = run_cases(2, setting, [case([TARGETS], budget, a) for a, budget in grid])
    for (aggregation, _), steps in zip(grid, results, strict=True):
        assert_same_step(steps, reference[aggregation], gradients=True)
        assert steps[0].stats == steps[1].stats


def test_stages_of_a_data_parallel_pipeline_may_have_different_numbers_of_micro_batches(
    reference: dict[str, list[Step]],
) -> None:
    results = run_cases(4, Setting(pp=2), [case([TARGETS[:6], TARGETS[6:]], 12), case([TARGETS, []], 12)])
    for steps in results:
        assert_same_step(steps, reference["token_mean"], gradients=False)


# --- scores


def scores_and_dense_logits(place: Place, temperature: float) -> tuple[Any, list[Tensor]]:
    with gang(place, PLAIN) as layout:
        model, _ = make_trainee(layout, PLAIN)
        scores = score(model, SAMPLES, temperature=temperature, max_tokens=30)
        with torch.no_grad():
            logits = [
                model(torch.tensor([s.prompt_ids + s.response_ids]), torch.arange(s.num_tokens)[None], None)[0]
                for s in SAMPLES
            ]
        return scores, logits


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_are_the_log_softmax_of_logits_over_temperature_once(temperature: float) -> None:
    ((scores, logits),) = run_gang(f"{HERE}:scores_and_dense_logits", 1, (temperature,))
    for sample, dense, logprobs, entropies in zip(SAMPLES, logits, scores.logprobs, scores.entropies, strict=True):
        expected = (dense[len(sample.prompt_ids) - 1 : -1, :70] / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert torch.allclose(logprobs, chosen, atol=1e-5)
        assert torch.allclose(entropies, -(expected.exp() * expected).sum(-1), atol=1e-5)
        assert logprobs.dtype == torch.float32
        assert not logprobs.requires_grad


@pytest.mark.parametrize(("world_size", "sizes"), [(2, {"tp": 2}), (2, {"pp": 2}), (2, {}), (4, {"tp": 2, "pp": 2})])
def test_scores_are_equal_on_every_layout_and_stand_on_the_last_stage(world_size: int, sizes: dict[str, int]) -> None:
    job = f"{JOBS}:score_samples"
    (expected,) = run_gang(job, 1, (PLAIN, [SAMPLES], TEMPERATURE, 30))
    shares = [SAMPLES, []] if not sizes else [SAMPLES]
    results = run_gang(job, world_size, (replace(PLAIN, **sizes), shares, TEMPERATURE, 30))
    if sizes.get("pp"):
        assert results[: world_size // 2] == [None] * (world_size // 2)
        results = results[world_size // 2 :]
    elif not sizes:
        assert results[1].logprobs == ()
        results = results[:1]
    for result in results:
        for a, b in zip((*expected.logprobs, *expected.entropies), (*result.logprobs, *result.entropies), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def score_then_train(place: Place, temperature: float, budget: int) -> Step:
    with gang(place, PLAIN) as layout:
        model, optimizer = make_trainee(layout, PLAIN)
        scores = score(model, SAMPLES, temperature=temperature, max_tokens=budget)
        assert scores is not None
        samples = [
            replace(target, old_logprobs=own, ref_logprobs=own)
            for target, own in zip(TARGETS, scores.logprobs, strict=True)
        ]
        stats = train_step(
            model,
            optimizer,
            samples,
            TOTALS,
            algorithm=WITH_KL,
            temperature=temperature,
            max_tokens=budget,
            before_write=lambda: None,
        )
        return Step(stats, [], [], 0, [])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_on_policy_the_ratio_is_exactly_one_and_the_kl_exactly_zero(temperature: float) -> None:
    (step,) = run_gang(f"{HERE}:score_then_train", 1, (temperature, 30))
    assert step.stats.ratio_min == step.stats.ratio_max == 1.0
    assert step.stats.ratio_sum == TOTALS.tokens
    assert step.stats.kl_loss == 0.0
    assert step.stats.clipped == 0


# --- the reported loss


def slope_along_gradient(place: Place, budget: int) -> tuple[float, float, float]:
    """The reported loss, its slope along the gradient measured by moving the weights, and what the slope must be."""
    setting = replace(PLAIN, train=PLAIN.train.model_copy(update={"clip_grad": 0.0}))
    with gang(place, setting) as layout:

        def step_at(shift: float) -> tuple[float, float]:
            model, optimizer = make_trainee(layout, setting)
            with torch.no_grad():
                for parameter, direction in zip(model.parameters(), directions, strict=True):
                    parameter.add_(direction, alpha=shift)
            optimizer.reload_masters()
            along: list[float] = []

            def measure() -> None:
                grads = [p.main_grad.clone() for p in model.parameters()]
                if not any(bool(d.any()) for d in directions):
                    directions[:] = [g / torch.cat([x.flatten() for x in grads]).norm() for g in grads]
                along.append(sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True)))

            stats = train_step(
                model,
                optimizer,
                TARGETS,
                TOTALS,
                algorithm=WITH_KL,
                temperature=TEMPERATURE,
                max_tokens=budget,
                before_write=measure,
            )
            return stats.loss, along[0]

        model, _ = make_trainee(layout, setting)
        directions = [torch.zeros_like(p) for p in model.parameters()]
        here, slope = step_at(0.0)
        h = 2e-3
        return here, (step_at(h)[0] - step_at(-h)[0]) / (2 * h), slope


@pytest.mark.parametrize("budget", [96, 48, 12])
def test_the_reported_loss_is_what_was_backpropagated(budget: int) -> None:
    ((_, measured, expected),) = run_gang(f"{HERE}:slope_along_gradient", 1, (budget,))
    assert measured == pytest.approx(expected, rel=1e-2)


# --- samples and steps that say nothing


def test_samples_without_loss_tokens_change_nothing(reference: dict[str, list[Step]]) -> None:
    silent = with_targets([make_sample(8, [1, 2], [], []), make_sample(9, [1, 2, 3], [4, 5, 6], [0, 0, 0])])
    cases = [case([TARGETS[:5], [*TARGETS[5:], *silent]], 30, aggregation) for aggregation in AGGREGATIONS]
    single = with_targets([make_sample(0, [1, 2], [3, 4, 5], [0, 1, 0])])
    one_token = ([[], single], StepTotals(1, 1, 16), WITH_KL, 30)
    *mixed, apart, alone = run_cases(2, PLAIN, [*cases, case([TARGETS, silent], 30), one_token])
    for aggregation, steps in zip(AGGREGATIONS, mixed, strict=True):
        assert_same_step(steps, reference[aggregation], gradients=True)
        assert steps[0].stats.masked_sequences == 2
    assert_same_step(apart, reference["token_mean"], gradients=True)
    assert sum(step.stats.tokens for step in alone) >= 1
    for step in alone:
        assert math.isfinite(step.stats.loss)
        assert not step.stats.skipped
        assert 0 < step.stats.grad_norm < math.inf


def steps_that_are_skipped(place: Place, setting: Setting) -> dict[str, tuple[Step, bool, float]]:
    """Each with whether any parameter changed, and the learning rate afterwards."""
    masked = with_targets([make_sample(0, [1, 2], [3, 4], [0, 0]), make_sample(1, [1], [], [])])
    # Only one rank sees what is not finite.
    broken = [[replace(TARGETS[0], advantage=float("inf")), *TARGETS[1:5]], TARGETS[5:]]
    nan = [[replace(TARGETS[0], advantage=float("nan")), *TARGETS[1:5]], TARGETS[5:]]
    with gang(place, setting) as layout:
        results = {}
        for name, shares, totals in (
            ("masked", [masked, masked[:1]], StepTotals(0, 0, 16)),
            ("inf", broken, TOTALS),
            ("nan", nan, TOTALS),
        ):
            model, optimizer = make_trainee(layout, setting)
            before = parameters(model)
            step = one_step(model, optimizer, shares[place.rank], totals, WITH_KL)
            changed = any(not torch.equal(a[3], b[3]) for a, b in zip(before, step.parameters, strict=True))
            changed |= optimizer.num_steps != 0
            moments = optimizer.megatron.optimizer.state.values()
            changed |= any(bool(moment.any()) for state in moments for moment in state.values())
            after = one_step(model, optimizer, [TARGETS[:5], TARGETS[5:]][place.rank], TOTALS, WITH_KL)
            results[name] = (step, changed, after.stats.grad_norm)
        return results


@pytest.mark.parametrize("setting", [PLAIN, Setting()], ids=["plain", "distributed"])
def test_a_step_that_cannot_be_taken_is_skipped_on_all_ranks(
    setting: Setting, reference: dict[str, list[Step]]
) -> None:
    for rank in run_gang(f"{HERE}:steps_that_are_skipped", 2, (setting,)):
        for name, (step, changed, next_norm) in rank.items():
            assert step.stats.skipped, name
            assert step.writes == 0, name
            assert not changed, name
            # Nothing of the skipped step is left in the gradients of the next one.
            assert next_norm == pytest.approx(reference["token_mean"][0].stats.grad_norm, rel=1e-5)
        masked = rank["masked"][0].stats
        assert (masked.loss, masked.tokens, masked.grad_norm) == (0.0, 0, 0.0)
        assert rank["inf"][0].stats.lr == setting.train.lr


def test_nan_where_the_mask_is_zero_or_a_coefficient_is_zero_has_no_influence(
    reference: dict[str, list[Step]],
) -> None:
    def poison(target: TrainSample, everywhere: bool) -> TrainSample:
        mask = torch.tensor(target.sample.loss_mask, dtype=torch.bool)
        nan = torch.full(mask.shape, torch.nan)
        assert target.ref_logprobs is not None
        return replace(
            target,
            old_logprobs=torch.where(mask, target.old_logprobs, nan),
            ref_logprobs=nan if everywhere else torch.where(mask, target.ref_logprobs, nan),
        )

    without_kl = {"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coef": 0.0}
    outside, everywhere, clean = run_cases(
        1,
        PLAIN,
        [
            case([[poison(t, False) for t in TARGETS]]),
            case([[poison(t, True) for t in TARGETS]], **without_kl),
            case([TARGETS], **without_kl),
        ],
    )
    assert_same_step(outside, reference["token_mean"], gradients=True)
    assert farthest(gradients_of(everywhere), gradients_of(clean)) == 0.0
    assert everywhere[0].stats.kl_loss is None


# --- vocabulary split over ranks


def split_vocabulary(place: Place, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    with gloo(place):
        local = logits.chunk(place.world_size, dim=-1)[place.rank].clone().requires_grad_()
        split = VocabSplit(dist.group.WORLD, place.rank, vocab_size=70)
        logprobs, entropies = token_logprobs(local, targets, split, entropy_gradient=True)
        ((logprobs * weights[0]).sum() + (entropies * weights[1]).sum()).backward()
        plain = token_logprobs(local, targets, split)
        (plain[0] * weights[0]).sum().backward()
        return logprobs.detach(), entropies.detach(), local.grad, torch.tensor(plain[1].requires_grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_log_probs_entropies_and_gradients_are_those_of_the_true_vocabulary(world_size: int) -> None:
    """Split in two, the second part of 128 columns has 6 tokens and 58 columns of padding."""
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(5, 128, generator=generator) * 3, torch.randn(2, 5, generator=generator)
    logits[:, 70:] = 1e4
    targets = torch.tensor([0, 63, 64, 69, 5])
    dense = logits.clone().requires_grad_()
    log_p = dense[:, :70].log_softmax(-1)
    chosen, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (2 * (chosen * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    results = run_gang(f"{HERE}:split_vocabulary", world_size, (logits, targets, weights))
    for logprobs, entropies, _, entropy_has_gradient in results:
        assert torch.allclose(logprobs, chosen, atol=1e-5)
        assert torch.allclose(entropies, entropy, atol=1e-5)
        assert not bool(entropy_has_gradient)
    assert dense.grad is not None
    assert torch.allclose(torch.cat([r[2] for r in results], dim=-1), dense.grad, atol=1e-5)


def test_the_entropy_of_equal_logits_is_the_log_of_the_number_of_tokens() -> None:
    ((_, entropies, _, _),) = run_gang(
        f"{HERE}:split_vocabulary", 1, (torch.zeros(3, 128), torch.tensor([0, 1, 2]), torch.zeros(2, 3))
    )
    assert entropies.tolist() == pytest.approx([math.log(70)] * 3, abs=1e-6)


# --- what is refused, and what gets no gradient


def test_fixed_scores_get_no_gradient() -> None:
    n = len(SAMPLES[0].response_ids)
    fixed = [torch.randn(n, requires_grad=True) for _ in range(3)]
    new, entropy = torch.randn(n, requires_grad=True), torch.randn(n, requires_grad=True)
    sample = TrainSample(SAMPLES[0], fixed[0], fixed[1], fixed[2])
    value, _ = loss.evaluate(new, entropy, [sample], totals_of(SAMPLES[:1]), WITH_KL)
    value.backward()
    assert new.grad is not None
    assert entropy.grad is not None
    assert [f.grad for f in fixed] == [None] * 3


def test_an_entropy_bonus_of_zero_has_no_backward() -> None:
    n = len(SAMPLES[0].response_ids)
    new, entropy = torch.randn(n, requires_grad=True), torch.full((n,), torch.nan, requires_grad=True)
    without = WITH_KL.model_copy(update={"entropy_coef": 0.0})
    value, _ = loss.evaluate(new, entropy, TARGETS[:1], totals_of(SAMPLES[:1]), without)
    value.backward()
    assert torch.isfinite(value)
    assert entropy.grad is None


def test_missing_and_misfit_scores_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 0/0 has no ref_logprobs"):
        loss.check([replace(TARGETS[0], ref_logprobs=None)], WITH_KL)
    loss.check([replace(TARGETS[0], ref_logprobs=None)], AlgorithmConfig())
    with pytest.raises(ValueError, match="sample 0/0 has 9 response tokens, but its old_logprobs"):
        loss.check([replace(TARGETS[0], old_logprobs=torch.zeros(3))], AlgorithmConfig())


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        score(None, SAMPLES, temperature=0.0, max_tokens=10)
