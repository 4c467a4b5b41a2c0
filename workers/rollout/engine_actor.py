"""What every engine's Ray actor is: the verbs of an engine, on threads that let it be asked while it works."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import ray

from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineView, GenerateRequest, GenerateResult, Proof, RolloutEngine
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan


class EngineActor:
    """`generate` has the actor's threads, one unless it says otherwise, and `receive` one of its own: it must not wait
    for responses that wait for it. What is in the group `control` answers beside them.

    An engine never restarts by itself: another process would hold other weights under the same name. It ends with
    the process that created it.
    """

    _engine_id: str
    _engine: RolloutEngine

    def __repr__(self) -> str:
        """Ray reads this once, after `__init__`: identity, never state."""
        return f"Engine({self._engine_id})"

    def _set_up(self, hook: str | None) -> None:
        """Last act of the constructor."""
        if hook is not None:
            pkgutil.resolve_name(hook)(self._engine)

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        return self._engine.generate(requests, sampling, expected)

    @ray.method(concurrency_group="transfer")
    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        return self._engine.receive(plan, rendezvous)

    @ray.method(concurrency_group="control")
    def pause(self) -> None:
        self._engine.pause()

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        self._engine.resume()

    @ray.method(concurrency_group="control")
    def flush(self) -> None:
        self._engine.flush()

    @ray.method(concurrency_group="control")
    def begin_update(self, manifest: Manifest) -> None:
        self._engine.begin_update(manifest)

    @ray.method(concurrency_group="control")
    def prove(self) -> Proof:
        return self._engine.prove()

    @ray.method(concurrency_group="control")
    def commit(self, manifest: Manifest) -> None:
        self._engine.commit(manifest)

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        self._engine.abort(reason)

    @ray.method(concurrency_group="control")
    def view(self) -> EngineView:
        return self._engine.view()
