"""The rollout engines of a run: who is alive, who serves which weights, and how an update reaches all of them.

An engine is either proven and serving, or it gets no traffic: whatever goes wrong with one takes it out of service
and says why, and the others go on. A call that finds none left raises `NoEngineLeft`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.proof_verdict import ProofVerdict
from orchestrator.rollouts.engine_lanes import EngineLost
from orchestrator.roster import EngineGone, EngineLink, NoEngineLeft, Replacements, Roster, in_words
from state.engine_life import EnginePhase, EngineStatus, EngineTransition
from state.gang import fingerprint
from state.journal import Journal
from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult, Proof, mismatches
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan

logger = logging.getLogger(__name__)
_IN_USE = (EnginePhase.UPDATING, EnginePhase.SERVING)


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """How long the fleet waits, in seconds: for an engine to start, to answer a ping, to end one phase of an update.

    Engines are looked after every `health_interval_s`. A flush that is refused is tried `flush_attempts` times,
    `flush_pause_s` apart.
    """

    start_s: float = 300.0
    ping_s: float = 15.0
    health_interval_s: float = 10.0
    phase_s: float = 300.0
    flush_attempts: int = 40
    flush_pause_s: float = 0.25


@dataclass(slots=True)
class _Update:
    """The update under way: its engines, what tore some of them, and who was found to hold what was published."""

    manifest: Manifest
    engines: tuple[str, ...]
    torn: dict[str, str]
    proven: set[str]


class Fleet:
    """Lives in one process, on one event loop. Each transition of an engine's life goes to the journal."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        journal: Journal,
        limits: FleetLimits,
        *,
        replacements: Replacements | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._journal, self._limits, self._sleep = journal, limits, sleep
        self._roster = Roster(links, self._record, self._note_death, limits.start_s, replacements)
        self._update: _Update | None = None
        self._updates = 0

    async def start(self) -> tuple[str, ...]:
        """Wait for the engines' constructors. Ids of those that came up, all stale."""
        await self._roster.start()
        await self._roster.someone_ready()
        return self._left()

    async def reconcile(self) -> tuple[str, ...]:
        """Ids of the engines that are up and answer; one that does not is dead from now on, and killed.

        A replacement that is still starting is waited for only when there is no other engine.
        """
        await self._look(self._roster.ready())
        await self._roster.someone_ready()
        return self._left()

    async def watch(self) -> None:
        """Look after the engines for ever: one that does not answer is dead, and replaced, whatever waits for it."""
        while True:
            await self._sleep(self._limits.health_interval_s)
            try:
                await self.check_health()
            except Exception:
                logger.exception("engines could not be looked after; they will be again")

    async def check_health(self) -> None:
        """One look at every engine. An update has limits of its own: none begins during it, and what one that began
        before it finds is nobody's business any more, for an engine may well be silent while it is updated."""
        if self._update is None:
            await self._look(self._roster.ready())

    def serving(self, weights: WeightId) -> tuple[str, ...]:
        """Ids of the engines proven to hold exactly `weights`, always in the same order."""
        return self._roster.serving(weights)

    def views(self) -> tuple[EngineStatus, ...]:
        """What is known of every engine, the dead too. Waits for nothing."""
        return self._roster.statuses()

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        """One result per request. `EngineRefused` unless the engine serves exactly `expected`, `EngineLost` when it
        dies over them. The caller limits the wait."""
        life = self._roster.life(engine_id)
        if not life.serves(expected):
            status = life.status
            raise EngineRefused(f"{engine_id} is {status.phase} with weights {status.weights}, not serving {expected}")
        try:
            results: tuple[GenerateResult, ...] = await self._roster.call(
                engine_id, "generate", tuple(requests), sampling, expected
            )
            return results
        except EngineGone as error:
            raise EngineLost(f"{engine_id} died over {len(requests)} requests: {error}") from error

    async def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        """Take every engine out of service, pause and flush it, and let it expect this manifest.

        Ids of the engines to send to; one that would not is stale with the reason. An update that was left open is
        aborted first. `EngineLifeError` before anything was touched if the weights are older than an engine's.
        """
        if self._update is not None:
            former = self._update
            await self.abort(former.manifest.publish_id, former.engines, f"overtaken by {manifest.publish_id}")
        life = self._roster.life
        updatable = (EnginePhase.STALE, EnginePhase.SERVING)
        chosen = tuple(e for e in self._roster.ready() if life(e).status.phase in updatable)
        for engine_id in chosen:
            life(engine_id).refuse_older(manifest.weights)
        for engine_id in chosen:
            life(engine_id).begin_update(manifest.publish_id, manifest.weights)
        self._update = _Update(manifest, chosen, {}, set())
        self._updates += 1
        for phase in (self._pause, self._flush, self._expect):
            await phase(manifest)
        return self._left_updating("could be paused, flushed and prepared")

    async def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        """Returns when every engine of the update has received the plan, with its bytes. One that failed is torn."""
        self._current()
        await self._phase(self._roster.updating(), "receive", plan, rendezvous)
        self._left_updating("received the weights")
        return plan.nbytes

    async def prove(self, manifest: Manifest) -> dict[str, ProofVerdict]:
        """Whether each engine of the update holds exactly the manifest."""
        update = self._current(manifest.publish_id)
        proofs = await self._phase(self._roster.updating(), "prove")
        verdicts: dict[str, ProofVerdict] = {}
        for engine_id in update.engines:
            proof = proofs.get(engine_id)
            if isinstance(proof, Proof):
                held = fingerprint(sorted(proof.tensors, key=lambda tensor: tensor.name))
                self._journal.append("proof", engine=engine_id, publish_id=proof.publish_id, digest=held)
                verdicts[engine_id] = ProofVerdict(_differences(proof, manifest))
                if verdicts[engine_id].holds:
                    update.proven.add(engine_id)
            else:
                verdicts[engine_id] = ProofVerdict(failed=update.torn[engine_id])
        return verdicts

    async def commit(self, manifest: Manifest, engine_ids: Sequence[str]) -> tuple[str, ...]:
        """These engines, found by `prove` to hold the manifest, serve from now on; ids of those that really do.

        Engines of the update that are not among them are aborted. `EngineRefused` when one was not proven.
        """
        update = self._current(manifest.publish_id)
        if unproven := sorted(set(engine_ids) - update.proven):
            raise EngineRefused(f"not proven to hold publish {manifest.publish_id}: {', '.join(unproven)}")
        left_out = [engine_id for engine_id in self._roster.updating() if engine_id not in engine_ids]
        await self._tear(dict.fromkeys(left_out, "not proven to hold what was published"))
        for verb, args in (("commit", (manifest,)), ("resume", ())):
            await self._phase(self._roster.updating(), verb, *args)
        committed = self._left_updating("could be committed")
        for engine_id in committed:
            self._roster.life(engine_id).commit(manifest.publish_id, manifest.weights)
        self._update = None
        return committed

    async def abort(self, publish_id: str, engine_ids: Sequence[str], reason: str) -> None:
        """These engines serve nothing, if this publish has touched them. Never fails: it follows failures."""
        affected = [
            engine_id
            for engine_id in engine_ids
            if (status := self._roster.life(engine_id).status).publish_id == publish_id and status.phase in _IN_USE
        ]
        await self._tear(dict.fromkeys(affected, reason))
        if self._update is not None and self._update.manifest.publish_id == publish_id and not self._roster.updating():
            self._update = None

    async def withdraw(self, reason: str) -> None:
        """No engine serves from here on, until the next publish; what they were generating or receiving is given up."""
        self._updates += 1
        affected = [e for e in self._roster.ready() if self._roster.life(e).status.phase in _IN_USE]
        await self._tear(dict.fromkeys(affected, reason))
        self._update = None

    def shutdown(self) -> None:
        """End every engine's process. Waits for nothing."""
        self._roster.close("shut down")

    async def _pause(self, manifest: Manifest) -> None:
        await self._phase(self._roster.updating(), "pause")

    async def _flush(self, manifest: Manifest) -> None:
        """A paused engine ends what is in flight within a token, so that it refuses for a moment only."""
        waiting = self._roster.updating()
        for attempt in range(1, self._limits.flush_attempts + 1):
            answers = await self._roster.each(waiting, "flush", limit_s=self._limits.phase_s)
            refused = {e: a for e, a in answers.items() if isinstance(a, EngineRefused)}
            await self._tear(
                {e: in_words(a) for e, a in answers.items() if isinstance(a, Exception) and e not in refused}
            )
            if not refused:
                return
            if attempt == self._limits.flush_attempts:
                await self._tear({e: f"{in_words(a)} (asked {attempt} times)" for e, a in refused.items()})
            else:
                waiting = tuple(refused)
                await self._sleep(self._limits.flush_pause_s)

    async def _expect(self, manifest: Manifest) -> None:
        await self._phase(self._roster.updating(), "begin_update", manifest)

    async def _phase(self, engine_ids: Sequence[str], verb: str, *args: Any) -> dict[str, Any]:
        """One step of an update on these engines. The answers of those that did it; the others are torn.

        `EngineRefused` when the update was given up meanwhile: what became of it then is nobody's business any more.
        """
        update = self._current()
        answers = await self._roster.each(engine_ids, verb, *args, limit_s=self._limits.phase_s)
        if self._update is not update:
            raise EngineRefused(f"publish {update.manifest.publish_id} was given up while engines were to {verb}")
        failed = {e: f"{verb}: {in_words(a)}" for e, a in answers.items() if isinstance(a, Exception)}
        await self._tear(failed)
        return {engine_id: answer for engine_id, answer in answers.items() if engine_id not in failed}

    async def _tear(self, reasons: Mapping[str, str]) -> None:
        """Out of service, each for its reason. The engine is told; one that does not listen is left to `reconcile`."""
        for engine_id, reason in reasons.items():
            life = self._roster.life(engine_id)
            if self._update is not None:
                self._update.torn.setdefault(engine_id, reason)
                self._update.proven.discard(engine_id)
            if life.status.phase is EnginePhase.UPDATING:
                life.abort(reason)
            elif life.status.phase is EnginePhase.SERVING:
                life.withdraw(reason)
        told = [engine_id for engine_id in reasons if self._roster.life(engine_id).alive]
        await asyncio.gather(*(self._roster.ask(e, "abort", reasons[e], limit_s=self._limits.ping_s) for e in told))

    async def _look(self, engine_ids: Sequence[str]) -> None:
        before = self._updates
        answers = await self._roster.each(engine_ids, "view", limit_s=self._limits.ping_s)
        if self._updates == before:
            for engine_id, answer in answers.items():
                if isinstance(answer, Exception):
                    self._roster.bury(engine_id, in_words(answer))

    def _note_death(self, engine_id: str, reason: str) -> None:
        if self._update is not None and engine_id in self._update.engines:
            self._update.torn.setdefault(engine_id, reason)
            self._update.proven.discard(engine_id)

    def _current(self, publish_id: str | None = None) -> _Update:
        if self._update is None or publish_id not in (None, self._update.manifest.publish_id):
            under_way = f"publish {self._update.manifest.publish_id}" if self._update else "none"
            asked = publish_id or ""
            raise EngineRefused(f"no publish {asked} has begun on these engines; under way is {under_way}")
        return self._update

    def _left(self) -> tuple[str, ...]:
        if not self._roster.ready():
            raise NoEngineLeft(f"no engine is alive: {self._roster.reasons()}")
        return self._roster.ready()

    def _left_updating(self, what: str) -> tuple[str, ...]:
        if not self._roster.updating():
            raise NoEngineLeft(f"no engine {what}: {self._roster.reasons()}")
        return self._roster.updating()

    def _record(self, step: EngineTransition) -> None:
        status = step.status
        self._journal.append(
            "engine",
            engine=status.engine_id,
            transition=status.transition,
            trigger=step.trigger,
            before=step.source,
            state=status.phase,
            incarnation=status.weights.incarnation if status.weights else None,
            version=status.weights.version if status.weights else None,
            publish_id=status.publish_id,
            reason=status.reason,
        )


def _differences(proof: Proof, manifest: Manifest) -> tuple[str, ...]:
    if proof.publish_id != manifest.publish_id:
        return (f"the proof is of publish {proof.publish_id}, not of {manifest.publish_id}",)
    return mismatches(manifest.tensors, proof.tensors)
