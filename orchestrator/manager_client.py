"""The rollout manager as the driver calls it: every call has a limit and says what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.placement import Placement
from orchestrator.rollout_desk import RolloutRefs
from orchestrator.rollout_manager import ManagerSpec, RolloutManager
from orchestrator.waiting import wait_for
from state.slots import WeightId
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan

START_TIMEOUT_S = 600.0
NAME = "the rollout manager"
PATIENCE_S = 30.0
"""The manager and its engines have limits of their own, which say more: the driver waits a little longer."""


class PendingRollout:
    """A rollout that is being generated."""

    def __init__(self, rollout_id: int, call: Any, timeout_s: float) -> None:
        self.rollout_id = rollout_id
        self._call, self._timeout_s = call, timeout_s
        self._refs: RolloutRefs | None = None

    def wait(self) -> RolloutRefs:
        """Return once it is generated and judged."""
        if self._refs is None:
            self._refs = wait_for(self._call, NAME, f"generate rollout {self.rollout_id}", self._timeout_s)
        return self._refs


class ManagerClient:
    """See `RolloutManager`; implements what a publish needs of the engines (`publish.Engines`)."""

    def __init__(self, spec: ManagerSpec) -> None:
        self._phase_s = spec.config.weights.timeout_s + PATIENCE_S
        self._rollout_s = spec.config.rollout.timeout_s + PATIENCE_S
        self.handle: Any = RolloutManager.options(  # type: ignore[attr-defined]
            name=f"{spec.config.run.name}/manager", namespace=spec.config.run.name, num_cpus=0
        ).remote(spec)
        self._starting = self.handle.start.remote()

    def wait_started(self) -> tuple[str, ...]:
        """Ids of the engines; they were started when this object was made."""
        engines: tuple[str, ...] = wait_for(self._starting, NAME, "start the engines", START_TIMEOUT_S)
        return engines

    def generate(self, rollout_id: int, weights: WeightId) -> PendingRollout:
        return PendingRollout(rollout_id, self.handle.generate.remote(rollout_id, weights), self._rollout_s)

    def evaluate(self, rollout_id: int, weights: WeightId) -> Mapping[str, Any]:
        metrics: Mapping[str, Any] = self._call("evaluate", self._rollout_s, rollout_id, weights)
        return metrics

    def mark_trained(self, rollout_id: int) -> None:
        self._call("mark_trained", PATIENCE_S, rollout_id)

    def data_state(self) -> dict[str, Any]:
        # It holds whole rollouts, which may be large.
        state: dict[str, Any] = self._call("data_state", self._rollout_s)
        return state

    def reconcile(self) -> tuple[str, ...]:
        engines: tuple[str, ...] = self._call("reconcile", self._phase_s)
        return engines

    def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        engines: tuple[str, ...] = self._call("begin_update", self._phase_s, manifest)
        return engines

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> Any:
        return self.handle.receive.remote(plan, rendezvous)

    def prove(self, manifest: Manifest) -> Mapping[str, Sequence[str]]:
        verdict: Mapping[str, Sequence[str]] = self._call("prove", self._phase_s, manifest)
        return verdict

    def commit(self, manifest: Manifest, engines: Sequence[str]) -> tuple[str, ...]:
        committed: tuple[str, ...] = self._call("commit", self._phase_s, manifest, engines)
        return committed

    def abort(self, publish_id: str, engines: Sequence[str], reason: str) -> None:
        self._call("abort", PATIENCE_S, publish_id, engines, reason)

    def shutdown(self) -> None:
        """End the engines, then the manager itself."""
        self._call("shutdown", PATIENCE_S)
        ray.kill(self.handle)

    def _call(self, verb: str, timeout_s: float, *args: Any) -> Any:
        return wait_for(getattr(self.handle, verb).remote(*args), NAME, verb.replace("_", " "), timeout_s)


def engine_options(placement: Placement, num_engines: int) -> tuple[Mapping[str, Any], ...]:
    """Ray's options of each engine: its own bundle."""
    return tuple(
        {"scheduling_strategy": PlacementGroupSchedulingStrategy(placement.group, placement.engine_bundle(index))}
        for index in range(num_engines)
    )
