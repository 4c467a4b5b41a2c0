"""The real publisher and the real fleet, between the toy run's workers and engines that hold what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from orchestrator import publish
from orchestrator.fleet import Fleet, FleetLimits
from orchestrator.publish import Publisher
from state.digest_records import TensorDigest
from state.gang import Quorum
from state.journal import Journal
from tests.state.toy_run import ToyRun
from workers.rollout.protocol import Proof
from workers.weights.manifest import Manifest


class Holder:
    """An engine that holds the manifest's tensors. `torn`: but for a bit of the first."""

    def __init__(self, engine_id: str, torn: bool) -> None:
        self.engine_id, self._torn = engine_id, torn
        self._manifest: Manifest | None = None

    async def call(self, verb: str, *args: Any) -> Any:
        if verb == "begin_update":
            self._manifest = args[0]
        return self._proof() if verb == "prove" else None

    def kill(self) -> None:
        return

    def _proof(self) -> Proof:
        assert self._manifest is not None
        first, *others = self._manifest.tensors
        held: tuple[TensorDigest, ...] = (replace(first, value=first.value ^ self._torn), *others)
        return Proof(self.engine_id, self._manifest.publish_id, held)


class Gang:
    """`TrainGroup` over the workers of a toy run."""

    def __init__(self, run: ToyRun) -> None:
        self._run = run
        self._scopes = ExitStack()

    def agree(self, publish_id: str) -> Quorum:
        return self._run.agree(publish_id)

    def begin_publish(self, quorum: Quorum) -> None:
        for worker in self._run.workers:
            self._scopes.enter_context(worker.machine.publishing(quorum))

    def open_endpoints(self, plan: Any, engines: Sequence[str]) -> tuple[()]:
        return ()

    def send(self, plan: Any) -> dict[str, Any]:
        return {}

    def end_publish(self, failure: str | None) -> None:
        scopes, self._scopes = self._scopes, ExitStack()
        scopes.close()


class Engines:
    """The fleet as the driver calls it. `torn` names engines that turn out to hold something else."""

    def __init__(self, journal: Journal, torn: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        links = [Holder(name, name in torn) for name in ("run/engine/0", "run/engine/1")]
        self.fleet = Fleet(links, journal, FleetLimits())
        self._do(self.fleet.start())

    def reconcile(self) -> tuple[str, ...]:
        return self._do(self.fleet.reconcile())  # type: ignore[no-any-return]

    def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        return self._do(self.fleet.begin_update(manifest))  # type: ignore[no-any-return]

    def receive(self, plan: Any, rendezvous: Any) -> Any:
        return self._do(self.fleet.receive(plan, rendezvous))

    def prove(self, manifest: Manifest) -> Mapping[str, Sequence[str]]:
        return self._do(self.fleet.prove(manifest))  # type: ignore[no-any-return]

    def commit(self, manifest: Manifest, engines: Sequence[str]) -> tuple[str, ...]:
        return self._do(self.fleet.commit(manifest, engines))  # type: ignore[no-any-return]

    def abort(self, publish_id: str, engines: Sequence[str], reason: str) -> None:
        self._do(self.fleet.abort(publish_id, engines, reason))

    def _do(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


class CommitsAll(Engines):
    """A fleet whose driver has every engine of an update committed, whatever was proven."""

    def commit(self, manifest: Manifest, engines: Sequence[str]) -> tuple[str, ...]:
        return super().commit(manifest, self.fleet.serving(manifest.weights) or self.reconcile())


def publisher(run: ToyRun, engines: Engines) -> Publisher:
    gather: Any = lambda calls, what, limit_s: dict(calls)  # noqa: E731
    publish.gather = gather
    gang: Any = Gang(run)
    return Publisher(gang, engines, run.driver, bucket_bytes=1 << 20, timeout_s=5.0)
