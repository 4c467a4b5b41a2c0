"""Values under the live weights of a critic, and one optimizer step of it, as `forward.py` does it for a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from workers.algorithms.aggregate import Aggregation, StepTotals, token_weights, weighted_sum
from workers.algorithms.value_loss import value_terms
from workers.batch import Sample
from workers.megatron import forward
from workers.megatron.loss import flat
from workers.megatron.micro_batches import MicroBatch
from workers.megatron.optimizer import StepOutcome, TrainOptimizer
from workers.megatron.step_stats import tell_all_stages


@dataclass(frozen=True, slots=True)
class ValueSample:
    """A sample and what the critic learns about it: its own values when the sample was made, and the returns. Float32
    [response_len], on any device; neither gets a gradient."""

    sample: Sample
    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class ValueStats:
    """One optimizer step over all ranks. `value_sum` and `clipped` are over the `tokens` that count; the rest as in
    `StepStats`."""

    loss: float
    value_sum: float
    clipped: int
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool


def score(model: forward.Model, samples: Sequence[Sample], *, max_tokens: int) -> tuple[Tensor, ...] | None:
    """The value of the state that each response token is chosen in: per sample float32 [response_len] on the CPU.

    On all ranks of the last pipeline stage; None on the others. Values have no temperature.
    """
    batches = forward.plan_batches(model, samples, max_tokens)

    def collect(batch: MicroBatch, output: Tensor, non_loss_data: bool) -> Tensor:
        return of_tokens(output, batch).cpu()

    with torch.no_grad():
        parts = forward.run(model, batches, collect, forward_only=True)
    return forward.in_order(batches, parts) if parallel_state.is_pipeline_last_stage() else None


def of_tokens(output: Tensor, batch: MicroBatch) -> Tensor:
    """From the model's output [b, s, 1] to float32 [n] per response token: at the token before it."""
    return output.reshape(-1).index_select(0, batch.rows)


def train_step(
    model: DistributedDataParallel,
    optimizer: TrainOptimizer,
    samples: Sequence[ValueSample],
    totals: StepTotals,
    *,
    aggregation: Aggregation,
    value_clip: float | None,
    max_tokens: int,
    before_write: Callable[[], None],
) -> ValueStats:
    """See `forward.train_step`, whose rules about totals, skipped steps and `before_write` hold here too.

    Raises:
        ValueError: values or returns of a sample do not fit its tokens.
    """
    _check(samples)
    if totals.is_empty:
        return ValueStats(0.0, 0.0, 0, 0, 0.0, optimizer.lr, skipped=True)
    batches = forward.plan_batches(model, [one.sample for one in samples], max_tokens)

    def objective(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = of_tokens(output, batch)
        members = [samples[i] for i in batch.members]
        masks = [torch.tensor(one.sample.loss_mask, dtype=torch.bool) for one in members]
        mask = flat(masks, torch.bool, values.device)
        old = flat([one.old_values for one in members], torch.float32, values.device)
        returns = flat([one.returns for one in members], torch.float32, values.device)
        terms = value_terms(values, old, returns, mask, value_clip=value_clip)
        # Without samples the sum is over nothing, but keeps its place in the graph.
        loss = weighted_sum(terms.loss, token_weights(masks, aggregation, totals).to(values.device))
        counted = torch.where(mask, values.detach(), torch.zeros((), device=values.device))
        sums = [loss.detach(), counted.sum(), terms.clipped.sum(), mask.sum()]
        return loss, torch.zeros((), dtype=torch.int, device=values.device), torch.stack([s.double() for s in sums])

    optimizer.zero_grad()
    parts = forward.run(model, batches, objective, forward_only=False)
    return _reduced(parts, optimizer.step(before_write), forward.device_of(model))


def _reduced(parts: Sequence[Tensor], outcome: StepOutcome, device: torch.device) -> ValueStats:
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    if parallel_state.is_pipeline_last_stage():
        sums = sums + torch.stack(list(parts)).sum(dim=0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    loss, value_sum, clipped, tokens = tell_all_stages(sums)
    return ValueStats(loss, value_sum, int(clipped), int(tokens), **dataclasses.asdict(outcome))


def _check(samples: Sequence[ValueSample]) -> None:
    for one in samples:
        length = len(one.sample.response_ids)
        for what, values in (("old values", one.old_values), ("returns", one.returns)):
            if tuple(values.shape) != (length,):
                name = f"sample {one.sample.group_id}/{one.sample.index}"
                raise ValueError(f"{name} has {length} response tokens, but its {what} are not a tensor of that length")


def summary(stats: Sequence[ValueStats]) -> dict[str, float]:
    """Metrics of one rollout: sums over its optimizer steps divided by counts; means of losses over steps taken."""
    tokens, taken = sum(s.tokens for s in stats), [s for s in stats if not s.skipped]
    per_token = {"critic/value_mean": sum(s.value_sum for s in stats)}
    per_token["critic/clip_fraction"] = float(sum(s.clipped for s in stats))
    per_step = {"critic/loss": [s.loss for s in taken], "critic/grad_norm": [s.grad_norm for s in taken]}
    return {
        **{name: value / tokens if tokens else float("nan") for name, value in per_token.items()},
        **{name: sum(values) / len(values) for name, values in per_step.items() if values},
        "critic/lr": stats[-1].lr,
        "critic/skipped_steps": float(len(stats) - len(taken)),
    }
