"""Publishing: where the gang and the fleet meet.

reconcile engines           bounded, and first: it may take minutes
attest, agree               every rank swears; they are unanimous, or no engine is touched
enter publishing            every rank acknowledges that it still holds what it swore to
pause, flush, send          engines stop, forget, receive; done when every sender and receiver is
prove                       each engine hashes what it now holds; it must equal the *gang's* digests
commit | abort              each engine serves the new version, or is stale and gets no traffic
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.proof_verdict import ProofVerdict
from orchestrator.roster import NoEngineLeft
from orchestrator.train_group import TrainGroup
from orchestrator.waiting import WorkerFailed, gather
from state.errors import InvariantViolation
from state.gang import Quorum
from state.journal import Journal
from state.slots import WeightId
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous, members
from workers.weights.send_plan import SendPlan, plan_send


class PublishFailed(InvariantViolation):
    """No engine holds the gang's weights, and at least one was found to hold others: none of them may serve."""


class Engines(Protocol):
    """The fleet, as a publish needs it. Every call has a limit of its own."""

    def reconcile(self) -> tuple[str, ...]:
        """Ids of the engines that are alive; raises when none is left."""

    def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        """Pause and flush every engine, and let it expect this manifest. Ids of those to send to."""

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> Any:
        """Start receiving; returns the pending call."""

    def prove(self, manifest: Manifest) -> Mapping[str, ProofVerdict]:
        """Whether each engine of the update holds exactly the manifest."""

    def commit(self, manifest: Manifest, engines: Sequence[str]) -> tuple[str, ...]:
        """These engines serve the manifest's version from now on, the others of the update nothing; ids of those
        that really do."""

    def abort(self, publish_id: str, engines: Sequence[str], reason: str) -> None:
        """These engines hold nothing that may serve."""


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish did. `seconds` is all of it, `verify_s` what attesting and proving took of that."""

    weights: WeightId
    digest: str
    engines: tuple[str, ...]
    nbytes: int
    seconds: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Publisher:
    """Publishes for one run. `timeout_s` limits the transfer; each engine receives in `engine_processes` processes."""

    gang: TrainGroup
    engines: Engines
    journal: Journal
    bucket_bytes: int
    timeout_s: float
    engine_processes: int = 1

    def publish(self, publish_id: str) -> Published:
        """Publish what the gang agrees on. Raises `InvariantViolation` or `WorkerFailed`; the journal has either."""
        began = time.perf_counter()
        engines = self.engines.reconcile()
        alive = time.perf_counter()
        quorum = self._enter(publish_id)
        manifest = Manifest(quorum.run, publish_id, quorum.slot, quorum.weights, quorum.tensors)
        entered = time.perf_counter()
        try:
            nbytes = self._transfer(manifest, quorum)
            sent = time.perf_counter()
            verdicts = self.engines.prove(manifest)
            proven = time.perf_counter()
            committed = self._conclude(manifest, verdicts)
        except BaseException as error:
            self._abandon(quorum, engines, _first_line(error))
            raise
        # Engines serve from here on, so the journal must say so before anything else can fail.
        self._record(quorum, "committed", _outcomes(verdicts, committed))
        self.gang.end_publish(None)
        verify_s = (entered - alive) + (proven - sent)
        return Published(quorum.weights, quorum.digest, committed, nbytes, time.perf_counter() - began, verify_s)

    def _enter(self, publish_id: str) -> Quorum:
        """Agree, and have every rank enter `publishing`. Until this returns no engine has been touched."""
        try:
            quorum = self.gang.agree(publish_id)
        except InvariantViolation as error:
            self.journal.append("publish", publish_id=publish_id, outcome="refused", reason=str(error))
            raise
        try:
            self.gang.begin_publish(quorum)
        except BaseException as error:
            self._record(quorum, "refused", {}, reason=_first_line(error))
            self.gang.end_publish(_first_line(error))
            raise
        return quorum

    def _transfer(self, manifest: Manifest, quorum: Quorum) -> int:
        """Engines stop and forget, then everything is sent; returns when all senders and all receivers are done."""
        engines = self.engines.begin_update(manifest)
        plan = plan_send(quorum.holders, quorum.tensors, self.bucket_bytes)
        receivers = members(engines, self.engine_processes)
        rendezvous = Rendezvous(receivers, self.gang.open_endpoints(plan, receivers))
        receiving = {"engines": self.engines.receive(plan, rendezvous)}
        gather(receiving | self.gang.send(plan), "transfer the weights", self.timeout_s)
        return plan.nbytes

    def _conclude(self, manifest: Manifest, verdicts: Mapping[str, ProofVerdict]) -> tuple[str, ...]:
        proven = tuple(engine for engine, verdict in verdicts.items() if verdict.holds)
        if not proven:
            words = "; ".join(f"{engine}: {verdict}" for engine, verdict in verdicts.items())
            told = f"publish {manifest.publish_id}: no engine holds {manifest.slot} as sworn to: {words}"
            if any(verdict.differences for verdict in verdicts.values()):
                raise PublishFailed(told)
            raise WorkerFailed(told, tuple(verdicts), "failure of every engine in a publish", NoEngineLeft(told))
        return self.engines.commit(manifest, proven)

    def _abandon(self, quorum: Quorum, engines: tuple[str, ...], reason: str) -> None:
        """Whatever ended the publish is the error to report; what fails in addition here must not hide it."""
        self._record(quorum, "aborted", dict.fromkeys(engines, f"torn: {reason}"), reason=reason)
        with suppress(WorkerFailed, InvariantViolation):
            self.engines.abort(quorum.publish_id, engines, reason)
        with suppress(WorkerFailed, InvariantViolation):
            self.gang.end_publish(reason)

    def _record(self, quorum: Quorum, outcome: str, engines: Mapping[str, str], **more: Any) -> None:
        self.journal.append(
            "publish",
            publish_id=quorum.publish_id,
            outcome=outcome,
            slot=quorum.slot,
            incarnation=quorum.weights.incarnation,
            version=quorum.weights.version,
            digest=quorum.digest,
            tensors={t.name: f"{t.value:016x}" for t in quorum.tensors},
            world_size=len(quorum.transitions),
            transitions=quorum.transitions,
            summaries=quorum.summaries,
            replicas=quorum.replicas,
            engines=dict(engines),
            **more,
        )


def _outcomes(verdicts: Mapping[str, ProofVerdict], committed: Sequence[str]) -> dict[str, str]:
    """By engine, what became of it: `committed`, or `torn: ` and why."""
    torn = {e: f"torn: {'did not commit' if verdict.holds else verdict}" for e, verdict in verdicts.items()}
    return torn | dict.fromkeys(committed, "committed")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
