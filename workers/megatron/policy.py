"""The actor as it learns: what a rank of its gang does with a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from state.machine import SlotMachine
from workers.algorithms.aggregate import StepTotals
from workers.batch import TrainShard
from workers.megatron.estimates import Targets, Values
from workers.megatron.experience import Experience, assemble, placeholders
from workers.megatron.forward import train_step
from workers.megatron.optimizer import TrainOptimizer
from workers.megatron.parallel import Coordinates
from workers.megatron.scoring import Scorer
from workers.megatron.spec import WorkerSpec
from workers.megatron.step_stats import summary


class Policy:
    """Every rank of the gang calls it together; ranks of one data-parallel coordinate with the same samples."""

    def __init__(
        self,
        spec: WorkerSpec,
        model: DistributedDataParallel,
        optimizer: TrainOptimizer,
        slots: SlotMachine,
        place: Coordinates,
    ) -> None:
        self._spec, self._model, self._optimizer, self._place = spec, model, optimizer, place
        self.scorer = Scorer(
            model,
            optimizer,
            slots,
            spec.algorithm,
            temperature=spec.temperature,
            max_tokens=spec.train.max_tokens_per_micro_batch,
        )

    def experience(self, shard: TrainShard, values: Values) -> tuple[Experience, Targets | None]:
        """What to train on, with what scoring measured; and what the critic whose `values` these are is to learn. On
        the last pipeline stage, where losses are computed."""
        algorithm = self._spec.algorithm
        scored, seconds = self.scorer.score(shard.samples)
        if not self._place.is_last_stage:
            return placeholders(shard, algorithm), None
        made, targets = assemble(shard, scored, algorithm, parallel_state.get_data_parallel_group(), values)
        return Experience(made.steps, seconds | made.metrics), targets

    def learn(self, shard: TrainShard, experience: Experience, before_write: Callable[[], None]) -> Mapping[str, float]:
        """All optimizer steps of one rollout; its metrics over all ranks."""
        stats = [
            train_step(
                self._model,
                self._optimizer,
                samples,
                StepTotals(step.total_tokens, step.total_sequences, self._spec.max_response_len),
                algorithm=self._spec.algorithm,
                temperature=self._spec.temperature,
                max_tokens=self._spec.train.max_tokens_per_micro_batch,
                before_write=before_write,
            )
            for step, samples in zip(shard.steps, experience.steps, strict=True)
        ]
        return {**experience.metrics, **summary(stats)}
