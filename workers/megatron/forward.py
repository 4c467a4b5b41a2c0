"""Scoring with the live weights, and one optimizer step, through Megatron's pipeline schedules.

Every rank of the gang calls these together. Ranks of one data-parallel coordinate get the same samples; different
coordinates may get different numbers of samples, also none. Micro-batches differ in length and number of samples, so
pipeline stages tell each other shapes (Megatron's `variable_seq_lengths`). Called inside `cpu.redirect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from workers.algorithms.aggregate import StepTotals
from workers.batch import Sample
from workers.config import AlgorithmConfig
from workers.megatron import loss, step_stats
from workers.megatron.loss import TrainSample
from workers.megatron.micro_batches import MicroBatch, plan
from workers.megatron.optimizer import TrainOptimizer
from workers.megatron.step_stats import StepStats
from workers.megatron.vocab_parallel import VocabSplit, token_logprobs

Model: TypeAlias = GPTModel | DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry per sample, in their order; float32 [response_len] on the CPU, without gradient."""

    logprobs: tuple[Tensor, ...]
    entropies: tuple[Tensor, ...]


def score(model: Model, samples: Sequence[Sample], *, temperature: float, max_tokens: int) -> Scores | None:
    """Log-probs of each response token, and entropies, under the live weights at `temperature`.

    Of the whole distribution, before any top-p or top-k cut, over the true vocabulary. On all ranks of the last
    pipeline stage; None on the others. Micro-batches have at most `max_tokens` padded tokens (a longer sample alone).
    `train_step` with the same samples, before anything changed, computes bit-identical log-probs.
    """
    _check_temperature(temperature)
    batches = plan_batches(model, samples, max_tokens)

    def collect(batch: MicroBatch, output: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
        logprobs, entropies = logprobs_of_tokens(model, output, batch, temperature, entropy_gradient=False)
        return logprobs.cpu(), entropies.cpu()

    with torch.no_grad():
        parts = run(model, batches, collect, forward_only=True)
    if not parallel_state.is_pipeline_last_stage():
        return None
    return Scores(
        in_order(batches, [logprobs for logprobs, _ in parts]),
        in_order(batches, [entropies for _, entropies in parts]),
    )


def train_step(
    model: DistributedDataParallel,
    optimizer: TrainOptimizer,
    samples: Sequence[TrainSample],
    totals: StepTotals,
    *,
    algorithm: AlgorithmConfig,
    temperature: float,
    max_tokens: int,
    before_write: Callable[[], None],
) -> StepStats:
    """Forward and backward over this rank's share of one optimizer step, then the step.

    `totals` are over all ranks; the gradient and the loss do not depend on how the step is split. `before_write` is
    called on every rank after gradients are reduced, immediately before parameters or optimizer state may change.
    The step is skipped, on all ranks alike and without `before_write`, when no token of it counts (nothing is
    computed) or when a gradient is not finite. The result is over all ranks and the same on every rank.

    Raises:
        ValueError: temperature 0, or scores of a sample that are missing or do not fit its tokens.
    """
    _check_temperature(temperature)
    loss.check(samples, algorithm)
    if totals.is_empty:
        return step_stats.nothing_to_learn(optimizer.lr)
    batches = plan_batches(model, [sample.sample for sample in samples], max_tokens)

    def objective(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, step_stats.Partial]:
        logprobs, entropies = logprobs_of_tokens(
            model, output, batch, temperature, entropy_gradient=algorithm.entropy_coef > 0
        )
        members = [samples[i] for i in batch.members]
        value, partial_stats = loss.evaluate(logprobs, entropies, members, totals, algorithm)
        # The second is Megatron's token count, for a division that we do not want.
        return value, torch.zeros((), dtype=torch.int, device=value.device), partial_stats

    optimizer.zero_grad()
    parts = run(model, batches, objective, forward_only=False)
    outcome = optimizer.step(before_write)
    return step_stats.reduce(parts, outcome, measures_kl=loss.has_kl_term(algorithm), device=device_of(model))


def gradient_norm(
    model: DistributedDataParallel,
    optimizer: TrainOptimizer,
    samples: Sequence[Sample],
    total_tokens: int,
    *,
    of_tokens: Callable[[Tensor, MicroBatch], Tensor],
    max_tokens: int,
) -> float:
    """Norm, over all ranks, of the gradient of a sum over this gang's samples / `total_tokens`.

    `of_tokens`: what is summed, from the model's output. Changes nothing but gradients, which are zero afterwards.
    """
    batches = plan_batches(model, samples, max_tokens)

    def objective(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
        summed = of_tokens(output, batch).sum() / total_tokens
        return summed, torch.zeros((), dtype=torch.int, device=output.device), None

    optimizer.zero_grad()
    run(model, batches, objective, forward_only=False)
    norm = optimizer.gradient_norm()
    optimizer.zero_grad()
    return norm


def run(model: Model, batches: Sequence[MicroBatch], consume: Callable[..., Any], *, forward_only: bool) -> list[Any]:
    """What `consume(batch, output)` returned for each batch, on the last stage; empty on the others."""

    def step(waiting: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(waiting)
        return module(batch.ids, batch.positions, None), partial(consume, batch)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        # Not used: stages send each other the shapes.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def logprobs_of_tokens(
    model: Model, output: Tensor, batch: MicroBatch, temperature: float, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """From logits [b, s, columns of this rank] to float32 [n] per response token. The one place where logits are
    divided by the temperature, for every policy alike."""
    # Response tokens are picked out first: padding costs no softmax, and whatever its logits are stays out.
    logits = output.reshape(-1, output.shape[-1]).index_select(0, batch.rows).float() / temperature
    split = VocabSplit(
        group=parallel_state.get_tensor_model_parallel_group(),
        rank=parallel_state.get_tensor_model_parallel_rank(),
        vocab_size=model.config.vocab_size,
    )
    return token_logprobs(logits, batch.targets, split, entropy_gradient=entropy_gradient)


def plan_batches(model: Model, samples: Sequence[Sample], max_tokens: int) -> list[MicroBatch]:
    """The micro-batches of this rank's samples, on the device of the model."""
    # Sequence parallelism splits a sequence evenly over TP ranks.
    multiple = parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1
    return plan(samples, max_tokens, device_of(model), multiple)


def in_order(batches: Sequence[MicroBatch], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """From values per response token of each batch to one tensor per sample, in the order they were planned from."""
    values: dict[int, Tensor] = {}
    for batch, part in zip(batches, parts, strict=True):
        values.update(zip(batch.members, torch.split(part, list(batch.lengths)), strict=True))
    return tuple(values[i] for i in range(len(values)))


def device_of(model: Model) -> torch.device:
    return next(model.parameters()).device


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs of a greedy policy are not defined; use more than 0")
