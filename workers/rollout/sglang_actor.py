"""An SGLang engine as a Ray actor. The server is a process of its own, which ends with the actor's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from workers.config import ModelConfig, PauseMode, WeightsConfig
from workers.device import Device
from workers.rollout.engine_actor import EngineActor


@ray.remote(concurrency_groups={"control": 4, "transfer": 1}, max_restarts=0, max_task_retries=0)
class SglangEngineActor(EngineActor):
    """`options`: the section `rollout.sglang`. `log`: where the server writes. As many calls of `generate` may be under
    way as Ray's `max_concurrency` says: the server batches what it has."""

    def __init__(
        self,
        engine_id: str,
        model: ModelConfig,
        *,
        device: Device,
        max_batch_size: int,
        tokenizer: str | None,
        weights: WeightsConfig,
        setup_hook: str | None,
        options: Mapping[str, Any],
        pause_mode: PauseMode,
        start_timeout_s: float,
        log: Path,
    ) -> None:
        from workers.rollout.sglang import SglangEngine
        from workers.rollout.sglang_options import SglangOptions

        self._engine_id = engine_id
        self._engine = SglangEngine(
            engine_id,
            model,
            SglangOptions.of(options),
            device=device,
            max_batch_size=max_batch_size,
            tokenizer=tokenizer,
            weights=weights,
            pause_mode=pause_mode,
            start_timeout_s=start_timeout_s,
            log=log,
        )
        self._set_up(setup_hook)
