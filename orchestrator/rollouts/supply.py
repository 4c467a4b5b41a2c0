"""Where the rollouts of a run come from, in the order in which they are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from orchestrator.rollouts.buffer import Rollout, RolloutBuffer
from orchestrator.rollouts.pipeline import RolloutPipeline
from state.slots import WeightId


class Supply(Protocol):
    """Hands out rollouts, and knows what of the data was trained on."""

    async def rollout(self, rollout_id: int, weights: WeightId) -> Rollout:
        """The rollout to train on as `rollout_id`, whole and judged. `weights` are those that engines serve."""
        ...

    def mark_trained(self, rollout_id: int) -> None:
        """Every rank has trained on it."""

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint: whoever continues from it loses no prompt and trains on none twice."""
        ...

    def hold(self) -> None:
        """Engines are about to be paused for a publish."""

    def serve(self, weights: WeightId) -> None:
        """Engines serve `weights` from here on."""

    def stop(self) -> None:
        """Nothing more is generated."""


class Batches:
    """Rollouts that are generated as a whole, when they are asked for: each by the weights that are served then. While
    one is being generated nobody publishes."""

    def __init__(self, pipeline: RolloutPipeline, data_state: Mapping[str, Any] | None) -> None:
        """`data_state`: what `state()` returned before, to continue from."""
        self._pipeline = pipeline
        if data_state is None:
            self._buffer = RolloutBuffer(pipeline.source.state())
        else:
            self._buffer = RolloutBuffer.from_state(data_state)
            pipeline.source.restore(self._buffer.made_cursor)

    async def rollout(self, rollout_id: int, weights: WeightId) -> Rollout:
        rollout = self._buffer.take(rollout_id)
        if rollout is None:
            rollout = await self._pipeline.generate(rollout_id, weights)
            self._buffer.add(rollout)
        return rollout

    def mark_trained(self, rollout_id: int) -> None:
        self._buffer.mark_trained(rollout_id)

    def state(self) -> dict[str, Any]:
        return self._buffer.state()

    def hold(self) -> None:
        return

    def serve(self, weights: WeightId) -> None:
        return

    def stop(self) -> None:
        return
