"""The embedded engine as a Ray actor.

Whoever starts engines imports this file, and no model code: that is loaded where the engine lives.
"""

from __future__ import annotations

import ray

from workers.config import ModelConfig, WeightsConfig
from workers.device import Device
from workers.rollout.engine_actor import EngineActor


@ray.remote(concurrency_groups={"control": 4, "transfer": 1}, max_restarts=0, max_task_retries=0)
class EmbeddedEngineActor(EngineActor):
    """A model inside the actor's own process."""

    def __init__(
        self,
        engine_id: str,
        model: ModelConfig,
        *,
        device: Device,
        max_batch_size: int,
        num_threads: int,
        tokenizer: str | None,
        weights: WeightsConfig,
        setup_hook: str | None,
    ) -> None:
        from workers.rollout.embedded import EmbeddedEngine
        from workers.weights import transports

        self._engine_id = engine_id
        self._engine = EmbeddedEngine(
            engine_id,
            model,
            transports.receiver(weights.transport, engine_id, device=device, timeout_s=weights.timeout_s),
            device=device,
            max_batch_size=max_batch_size,
            num_threads=num_threads,
            tokenizer=tokenizer,
        )
        self._set_up(setup_hook)
