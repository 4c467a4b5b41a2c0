"""The critic as it learns: what a rank of its gang does with a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from workers.algorithms.aggregate import StepTotals
from workers.algorithms.gae import Moments
from workers.batch import TrainShard
from workers.megatron import values
from workers.megatron.estimates import Targets, Values, gathered
from workers.megatron.optimizer import TrainOptimizer
from workers.megatron.parallel import Coordinates
from workers.megatron.spec import WorkerSpec
from workers.megatron.values import ValueSample


class Critic:
    """Every rank of the gang calls it together; ranks of one data-parallel coordinate with the same samples."""

    def __init__(
        self, spec: WorkerSpec, model: DistributedDataParallel, optimizer: TrainOptimizer, place: Coordinates
    ) -> None:
        self._spec, self._model, self._optimizer, self._place = spec, model, optimizer, place

    def values(self, shard: TrainShard) -> Values:
        """Of every sample, on the last pipeline stage; None on the others."""
        max_tokens = self._spec.train.max_tokens_per_micro_batch
        return values.score(self._model, shard.samples, max_tokens=max_tokens)

    def learn(
        self, shard: TrainShard, targets: Targets | None, before_write: Callable[[], None]
    ) -> Mapping[str, float]:
        """All optimizer steps of one rollout; its metrics over all ranks."""
        metrics: dict[str, float] = {}
        if self._place.is_last_stage:
            if targets is None:
                raise ValueError(f"{self._spec.worker} was given no returns of rollout {shard.rollout_id} to learn")
            metrics = {"critic/explained_variance": _explained_variance(shard, targets)}
        learned = iter(_samples(shard, targets))
        stats = [
            values.train_step(
                self._model,
                self._optimizer,
                [next(learned) for _ in step.samples],
                StepTotals(step.total_tokens, step.total_sequences, self._spec.max_response_len),
                aggregation=self._spec.algorithm.loss_aggregation,
                value_clip=self._spec.value_clip,
                max_tokens=self._spec.train.max_tokens_per_micro_batch,
                before_write=before_write,
            )
            for step in shard.steps
        ]
        return metrics | values.summary(stats)


def _samples(shard: TrainShard, targets: Targets | None) -> list[ValueSample]:
    """Pipeline stages before the last pass activations on and never see a loss: what they have is not looked at."""
    if targets is None:
        nothing = [torch.zeros(len(sample.response_ids)) for sample in shard.samples]
        targets = Targets(nothing, nothing)
    return [ValueSample(*parts) for parts in zip(shard.samples, targets.values, targets.returns, strict=True)]


def _explained_variance(shard: TrainShard, targets: Targets) -> float:
    """Share of the variance of returns that the values before this rollout's training foresaw, over all loss tokens:
    1 at best, 0 for what a constant would do, less for worse. Not a number where all returns are equal."""
    masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in shard.samples]
    errors: list[Tensor] = [r - v for r, v in zip(targets.returns, targets.values, strict=True)]
    own = (Moments.of(errors, masks), Moments.of(targets.returns, masks))
    parts = gathered(own, parallel_state.get_data_parallel_group())
    error, returns = (Moments.sum(part).variance for part in zip(*parts, strict=True))
    return 1.0 - error / returns if returns > 0 else float("nan")
