"""Where actors go: one placement group for the gang and the engines, and a plain answer when it does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from orchestrator.config import Config
from orchestrator.waiting import WorkerFailed
from state.slots import Slot

EXPLAIN_AFTER_S = 20.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles are the training ranks', gang after gang of `num_workers` in the order of `roles`, then one per
    engine."""

    group: PlacementGroup
    roles: tuple[str, ...]
    num_workers: int
    num_engines: int

    def worker_bundle(self, role: str, rank: int) -> int:
        return self.roles.index(role) * self.num_workers + rank

    def engine_bundle(self, index: int) -> int:
        return len(self.roles) * self.num_workers + index

    def wait(self, config: Config, say: Callable[[str], None]) -> None:
        """Return once everything is reserved; what was on a node that died, on another. While it does not fit, says
        what is asked, there and free."""
        asked = bundles(config)
        limit = config.cluster.placement_timeout_s
        started, told = time.monotonic(), 0.0
        # In short waits, for signals wait for their end.
        while not self.group.wait(1):
            waited = time.monotonic() - started
            if waited < min(told + EXPLAIN_AFTER_S, limit):
                continue
            told = waited
            report = explain(asked, ray.cluster_resources(), ray.available_resources())
            if waited >= limit:
                raise WorkerFailed(
                    f"no room for the run after cluster.placement_timeout_s = {limit:g} s: {report}. Lower the ranks, "
                    "engines or what each reserves (train.cpus_per_worker, rollout.cpus_per_engine, and gpus_per_…), "
                    "or add nodes"
                )
            say(f"waiting for room, {waited:.0f} of {limit:g} s: {report}")

    def remove(self) -> None:
        remove_placement_group(self.group)


def bundles(config: Config) -> list[dict[str, float]]:
    """What each actor asks for, in the order of the bundles."""
    worker = _bundle(config.train.cpus_per_worker, config.train.gpus_per_worker)
    engine = _bundle(config.rollout.cpus_per_engine, config.rollout.gpus_per_engine)
    return [worker] * (config.train.num_workers * len(roles(config))) + [engine] * _num_engines(config)


def roles(config: Config) -> tuple[Slot, ...]:
    """Of the gangs that train."""
    return (Slot.ACTOR, Slot.CRITIC) if config.algorithm.needs_critic else (Slot.ACTOR,)


def _num_engines(config: Config) -> int:
    return config.rollout.num_engines if config.debug.load_rollouts is None else 0


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


def place(config: Config) -> Placement:
    """Ask for everything a run needs, all or nothing."""
    group = placement_group(bundles(config), strategy="PACK")
    return Placement(group, roles(config), config.train.num_workers, _num_engines(config))


def explain(asked: list[dict[str, float]], existing: dict[str, float], free: dict[str, float]) -> str:
    """`asked CPU 5 GPU 4; the cluster has CPU 8 GPU 2; free now CPU 1 GPU 2`."""
    kinds = sorted({kind for bundle in asked for kind in bundle})
    total = {kind: sum(bundle.get(kind, 0.0) for bundle in asked) for kind in kinds}
    parts = [("asked", total), ("the cluster has", existing), ("free now", free)]
    return "; ".join(f"{words} " + " ".join(f"{k} {have.get(k, 0.0):g}" for k in kinds) for words, have in parts)
