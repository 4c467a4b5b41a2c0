"""Hands out rollouts to training and keeps account of them.

Supply (DataSource -> requests -> engines -> rewards) -> Rollout -> shards, one object per data-parallel rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from orchestrator.batching import data_parallel_size, steps_per_rollout
from orchestrator.config import Config
from orchestrator.data.tokenizer import load_tokenizer
from orchestrator.dispatch import behaviour_versions, shards, trainable
from orchestrator.rollouts.engine_lanes import Engines
from orchestrator.rollouts.files import write_rollout
from orchestrator.rollouts.group_stream import GroupStream
from orchestrator.rollouts.pipeline import RolloutPipeline
from orchestrator.rollouts.supply import Batches, Supply
from orchestrator.tracking.jsonl import JsonlTracker
from state.slots import WeightId
from workers.batch import TrainShard


@dataclass(frozen=True, slots=True)
class RolloutRefs:
    """A rollout ready to be trained on: one reference to a `TrainShard` per data-parallel rank, and its metrics.

    `behaviour`: the versions of the actor that generated its samples, sorted.
    """

    rollout_id: int
    shards: tuple[Any, ...]
    stats: Mapping[str, Any]
    behaviour: tuple[int, ...]


class RolloutDesk:
    """Everything about rollouts but the lives of the engines. What it put into the object store stays there until it is
    marked as trained: objects end with the last reference of the process that put them."""

    def __init__(
        self,
        config: Config,
        engines: Engines,
        samples: Path,
        start_rollout_id: int,
        data_state: Mapping[str, Any] | None,
        put: Callable[[TrainShard], Any] = ray.put,
    ) -> None:
        """`data_state`: what `data_state()` returned before, to continue from. Raises `ResumeError` for other data."""
        self._config, self._put = config, put
        self._shown = JsonlTracker(samples, start_rollout_id)
        self._pipeline = RolloutPipeline(config, load_tokenizer(config.model), engines, self._shown)
        self._supply: Supply
        if config.loop.mode == "fully_async":
            self._supply = GroupStream(config, self._pipeline, engines, start_rollout_id, data_state)
        else:
            self._supply = Batches(self._pipeline, data_state)
        self._refs: dict[int, RolloutRefs] = {}

    async def generate(self, rollout_id: int, weights: WeightId) -> RolloutRefs:
        """Rollout `rollout_id` by engines that hold `weights`; one that was made before is handed out again."""
        if rollout_id in self._refs:
            return self._refs[rollout_id]
        rollout = await self._supply.rollout(rollout_id, weights)
        if self._config.debug.save_rollouts is not None:
            write_rollout(Path(self._config.debug.save_rollouts), rollout)
        self._pipeline.show(rollout_id, rollout.samples, kind="train")
        parts = shards(rollout_id, rollout.samples, steps_per_rollout(self._config), data_parallel_size(self._config))
        stats = {**rollout.stats, "rollout/trained_samples": len(trainable(rollout.samples))}
        put = tuple(self._put(part) for part in parts)
        refs = RolloutRefs(rollout_id, put, stats, behaviour_versions(rollout.samples))
        self._refs[rollout_id] = refs
        return refs

    async def evaluate(self, rollout_id: int, weights: WeightId) -> dict[str, Any]:
        return await self._pipeline.evaluate(rollout_id, weights)

    def mark_trained(self, rollout_id: int) -> None:
        """Every rank has trained on it: it may be forgotten, and the saved cursor moves past it."""
        self._supply.mark_trained(rollout_id)
        del self._refs[rollout_id]

    def data_state(self) -> dict[str, Any]:
        """JSON for a checkpoint: how far the data was trained on, and what is made but not trained."""
        return self._supply.state()

    def hold(self) -> None:
        """Engines are about to be paused for a publish."""
        self._supply.hold()

    def serve(self, weights: WeightId) -> None:
        """Engines serve `weights` from here on."""
        self._supply.serve(weights)

    def close(self) -> None:
        """Nothing more is generated."""
        self._supply.stop()
        self._shown.close()
