"""Rollout engines as Ray actors: starting them, and calling them by verb."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from orchestrator.config import Config
from orchestrator.rollouts.engine_lanes import CallLimits
from orchestrator.roster import EngineGone, Replacements
from workers.rollout.embedded_actor import EmbeddedEngineActor
from workers.rollout.protocol import EngineDied
from workers.rollout.sglang_actor import SglangEngineActor
from workers.rollout.sglang_options import SglangOptions

START_LIMIT_S = 280.0
"""Of a server, so that it is told why it does not come up before the fleet gives it up."""


class RayEngine:
    """One engine. Holds the handle that keeps its actor alive."""

    def __init__(self, engine_id: str, handle: Any) -> None:
        self.engine_id = engine_id
        self._handle = handle

    async def call(self, verb: str, *args: Any) -> Any:
        """The engine's own error when it raised one; `EngineGone` when its process is no more."""
        try:
            return await getattr(self._handle, verb).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, EngineDied):
                raise EngineGone(str(error.cause)) from error
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise
        except RayActorError as error:
            raise EngineGone(str(error).splitlines()[0]) from error

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)


def start_engine(config: Config, index: int, options: Mapping[str, Any], logs: Path | None = None) -> RayEngine:
    """Engine number `index` of the run, with Ray's `options` (scheduling strategy, runtime environment).

    Named `RUN/engine/INDEX` in the namespace of the run. Its constructor runs on; the fleet waits for it. `logs`:
    where an engine with a process of its own lets it write; None: among the temporary files of its node.
    """
    rollout = config.rollout
    engine_id = f"{config.run.name}/engine/{index}"
    actor, more, at_once = _kind(config, index, logs or Path(tempfile.gettempdir()))
    handle = actor.options(
        name=engine_id,
        namespace=config.run.name,
        num_cpus=rollout.cpus_per_engine,
        num_gpus=rollout.gpus_per_engine,
        **at_once,
        **options,
    ).remote(
        engine_id,
        config.model,
        device="cuda" if rollout.gpus_per_engine else "cpu",
        max_batch_size=rollout.max_batch_size,
        tokenizer=config.model.tokenizer or config.model.hf_checkpoint,
        weights=config.weights,
        setup_hook=rollout.setup_hook,
        **more,
    )
    return RayEngine(engine_id, handle)


def start_engines(
    config: Config, actor_options: Sequence[Mapping[str, Any]], logs: Path | None = None
) -> list[RayEngine]:
    """One engine for each entry of `actor_options`, in that order."""
    return [start_engine(config, index, options, logs) for index, options in enumerate(actor_options)]


def replacements(config: Config, actor_options: Sequence[Mapping[str, Any]], logs: Path | None = None) -> Replacements:
    """Engines that take the place of dead ones get a number of their own, so that nobody takes them for those."""
    return Replacements(
        lambda seat, index: start_engine(config, index, actor_options[seat], logs),
        config.rollout.max_engine_replacements,
    )


def engine_processes(config: Config) -> int:
    """How many processes each engine receives weights in."""
    return SglangOptions.of(config.rollout.sglang).tp_size if config.rollout.engine == "sglang" else 1


def _kind(config: Config, index: int, logs: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The actor class of an engine, what this kind is told beside the rest, and what it needs of Ray."""
    rollout = config.rollout
    match rollout.engine:
        case "embedded":
            return EmbeddedEngineActor, {"num_threads": max(1, int(rollout.cpus_per_engine))}, {}
        case "sglang":
            log = logs / f"{config.run.name}-engine-{index}.log"
            told = {
                "options": rollout.sglang,
                "pause_mode": rollout.pause_mode,
                "start_timeout_s": START_LIMIT_S,
                "log": log,
            }
            return SglangEngineActor, told, {"max_concurrency": CallLimits.of(rollout).calls}
