"""The rollout engines of a run: who is alive, who serves which weights, and how an update reaches all of them.

An engine is either proven and serving, or it gets no traffic: whatever goes wrong with one takes it out of service
and says why, and the others go on. A call that finds none left raises `NoEngineLeft`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.rollout_pipeline import EngineLost
from state.engine_life import EngineLife, EnginePhase, EngineStatus, EngineTransition
from state.errors import SlotwiseError
from state.journal import Journal
from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult, Proof, mismatches
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan


class NoEngineLeft(SlotwiseError):
    """No engine is left that could go on; the message has each one's reason."""


class EngineGone(SlotwiseError):
    """The process of an engine is no more."""


class EngineLink(Protocol):
    """How the fleet reaches one engine. The verbs are those of `RolloutEngine`."""

    engine_id: str

    async def call(self, verb: str, *args: Any) -> Any:
        """Raises what the engine raised, or `EngineGone`."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """How long the fleet waits, in seconds: for an engine to start, to answer a ping, to end one phase of an update.

    A flush that is refused is tried `flush_attempts` times, `flush_pause_s` apart.
    """

    start_s: float = 300.0
    ping_s: float = 15.0
    phase_s: float = 300.0
    flush_attempts: int = 40
    flush_pause_s: float = 0.25


@dataclass(slots=True)
class _Engine:
    link: EngineLink
    life: EngineLife


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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._journal, self._limits, self._sleep = journal, limits, sleep
        self._engines = {link.engine_id: _Engine(link, EngineLife(link.engine_id, self._record)) for link in links}
        self._update: _Update | None = None

    async def start(self) -> tuple[str, ...]:
        """Wait for the engines' constructors. Ids of those that came up, all stale."""
        answers = await self._each(self._alive(), "view", limit_s=self._limits.start_s, fatal=True)
        for engine_id, answer in answers.items():
            if not isinstance(answer, Exception):
                self._engines[engine_id].life.started()
        return self._left()

    async def reconcile(self) -> tuple[str, ...]:
        """Ids of the engines that answer; one that does not is dead from now on, and killed."""
        await self._each(self._alive(), "view", limit_s=self._limits.ping_s, fatal=True)
        return self._left()

    def serving(self, weights: WeightId) -> tuple[str, ...]:
        """Ids of the engines proven to hold exactly `weights`, always in the same order."""
        return tuple(engine_id for engine_id, engine in self._engines.items() if engine.life.serves(weights))

    def views(self) -> tuple[EngineStatus, ...]:
        """What is known of every engine, the dead too. Waits for nothing."""
        return tuple(engine.life.status for engine in self._engines.values())

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        """One result per request. `EngineRefused` unless the engine serves exactly `expected`, `EngineLost` when it
        dies over them. The caller limits the wait."""
        engine = self._engines[engine_id]
        if not engine.life.serves(expected):
            status = engine.life.status
            raise EngineRefused(f"{engine_id} is {status.phase} with weights {status.weights}, not serving {expected}")
        try:
            return await engine.link.call("generate", tuple(requests), sampling, expected)
        except EngineGone as error:
            self._bury(engine_id, str(error))
            raise EngineLost(f"{engine_id} died over {len(requests)} requests: {error}") from error

    async def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        """Take every engine out of service, pause and flush it, and let it expect this manifest.

        Ids of the engines to send to; one that would not is stale with the reason. An update that was left open is
        aborted first. `EngineLifeError` before anything was touched if the weights are older than an engine's.
        """
        if self._update is not None:
            former = self._update
            await self.abort(former.manifest.publish_id, former.engines, f"overtaken by {manifest.publish_id}")
        chosen = tuple(
            engine_id
            for engine_id, engine in self._engines.items()
            if engine.life.status.phase in (EnginePhase.STALE, EnginePhase.SERVING)
        )
        for engine_id in chosen:
            self._engines[engine_id].life.refuse_older(manifest.weights)
        for engine_id in chosen:
            self._engines[engine_id].life.begin_update(manifest.publish_id, manifest.weights)
        self._update = _Update(manifest, chosen, {}, set())
        for phase in (self._pause, self._flush, self._expect):
            await phase(manifest)
        return self._left_updating("could be paused, flushed and prepared")

    async def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        """Returns when every engine of the update has received the plan, with its bytes. One that failed is torn."""
        self._current()
        await self._phase(self._updating(), "receive", plan, rendezvous)
        self._left_updating("received the weights")
        return plan.nbytes

    async def prove(self, manifest: Manifest) -> dict[str, tuple[str, ...]]:
        """By engine of the update, in words, every tensor that is not the manifest's; empty: it holds exactly that."""
        update = self._current(manifest.publish_id)
        proofs = await self._phase(self._updating(), "prove")
        verdict: dict[str, tuple[str, ...]] = {}
        for engine_id in update.engines:
            proof = proofs.get(engine_id)
            if isinstance(proof, Proof):
                verdict[engine_id] = _differences(proof, manifest)
                if not verdict[engine_id]:
                    update.proven.add(engine_id)
            else:
                verdict[engine_id] = (update.torn[engine_id],)
        return verdict

    async def commit(self, manifest: Manifest, engine_ids: Sequence[str]) -> tuple[str, ...]:
        """These engines, found by `prove` to hold the manifest, serve from now on; ids of those that really do.

        Engines of the update that are not among them are aborted. `EngineRefused` when one was not proven.
        """
        update = self._current(manifest.publish_id)
        if unproven := sorted(set(engine_ids) - update.proven):
            raise EngineRefused(f"not proven to hold publish {manifest.publish_id}: {', '.join(unproven)}")
        left_out = [engine_id for engine_id in self._updating() if engine_id not in engine_ids]
        await self._tear(dict.fromkeys(left_out, "not proven to hold what was published"))
        for verb, args in (("commit", (manifest,)), ("resume", ())):
            await self._phase(self._updating(), verb, *args)
        committed = self._left_updating("could be committed")
        for engine_id in committed:
            self._engines[engine_id].life.commit(manifest.publish_id, manifest.weights)
        self._update = None
        return committed

    async def abort(self, publish_id: str, engine_ids: Sequence[str], reason: str) -> None:
        """These engines serve nothing, if this publish has touched them. Never fails: it follows failures."""
        affected = [
            engine_id
            for engine_id in engine_ids
            if (status := self._engines[engine_id].life.status).publish_id == publish_id
            and status.phase in (EnginePhase.UPDATING, EnginePhase.SERVING)
        ]
        await self._tear(dict.fromkeys(affected, reason))
        if self._update is not None and self._update.manifest.publish_id == publish_id and not self._updating():
            self._update = None

    def shutdown(self) -> None:
        """End every engine's process. Waits for nothing."""
        for engine_id in self._alive():
            self._bury(engine_id, "shut down")

    async def _pause(self, manifest: Manifest) -> None:
        await self._phase(self._updating(), "pause")

    async def _flush(self, manifest: Manifest) -> None:
        """A paused engine ends what is in flight within a token, so that it refuses for a moment only."""
        waiting = self._updating()
        for attempt in range(1, self._limits.flush_attempts + 1):
            answers = await self._each(waiting, "flush", limit_s=self._limits.phase_s)
            refused = {e: a for e, a in answers.items() if isinstance(a, EngineRefused)}
            await self._tear(
                {e: _words(a) for e, a in answers.items() if isinstance(a, Exception) and e not in refused}
            )
            if not refused:
                return
            if attempt == self._limits.flush_attempts:
                await self._tear({e: f"{_words(a)} (asked {attempt} times)" for e, a in refused.items()})
            else:
                waiting = tuple(refused)
                await self._sleep(self._limits.flush_pause_s)

    async def _expect(self, manifest: Manifest) -> None:
        await self._phase(self._updating(), "begin_update", manifest)

    async def _phase(self, engine_ids: Sequence[str], verb: str, *args: Any) -> dict[str, Any]:
        """One step of an update on these engines. The answers of those that did it; the others are torn.

        `EngineRefused` when the update was given up meanwhile: what became of it then is nobody's business any more.
        """
        update = self._current()
        answers = await self._each(engine_ids, verb, *args, limit_s=self._limits.phase_s)
        if self._update is not update:
            raise EngineRefused(f"publish {update.manifest.publish_id} was given up while engines were to {verb}")
        failed = {e: f"{verb}: {_words(a)}" for e, a in answers.items() if isinstance(a, Exception)}
        await self._tear(failed)
        return {engine_id: answer for engine_id, answer in answers.items() if engine_id not in failed}

    async def _tear(self, reasons: Mapping[str, str]) -> None:
        """Out of service, each for its reason. The engine is told; one that does not listen is left to `reconcile`."""
        for engine_id, reason in reasons.items():
            life = self._engines[engine_id].life
            if self._update is not None:
                self._update.torn.setdefault(engine_id, reason)
                self._update.proven.discard(engine_id)
            if life.status.phase is EnginePhase.UPDATING:
                life.abort(reason)
            elif life.status.phase is EnginePhase.SERVING:
                life.withdraw(reason)
        told = [engine_id for engine_id in reasons if self._engines[engine_id].life.alive]
        await asyncio.gather(*(self._ask(e, "abort", reasons[e], limit_s=self._limits.ping_s) for e in told))

    async def _each(
        self, engine_ids: Sequence[str], verb: str, *args: Any, limit_s: float, fatal: bool = False
    ) -> dict[str, Any]:
        """Answers or errors by engine, all asked at once. With `fatal`, an engine that fails to answer is dead."""
        answers = await asyncio.gather(*(self._ask(e, verb, *args, limit_s=limit_s) for e in engine_ids))
        for engine_id, answer in zip(engine_ids, answers, strict=True):
            if fatal and isinstance(answer, Exception):
                self._bury(engine_id, _words(answer))
        return dict(zip(engine_ids, answers, strict=True))

    async def _ask(self, engine_id: str, verb: str, *args: Any, limit_s: float) -> Any:
        """The answer, or the error that came instead of it."""
        try:
            return await asyncio.wait_for(self._engines[engine_id].link.call(verb, *args), limit_s)
        except EngineGone as error:
            self._bury(engine_id, _words(error))
            return error
        except TimeoutError:
            return TimeoutError(f"{engine_id} did not answer {verb} within {limit_s:g} s")
        except Exception as error:
            return error

    def _bury(self, engine_id: str, reason: str) -> None:
        engine = self._engines[engine_id]
        if engine.life.alive:
            if self._update is not None and engine_id in self._update.engines:
                self._update.torn.setdefault(engine_id, reason)
                self._update.proven.discard(engine_id)
            engine.life.die(reason)
            engine.link.kill()

    def _current(self, publish_id: str | None = None) -> _Update:
        if self._update is None or publish_id not in (None, self._update.manifest.publish_id):
            under_way = f"publish {self._update.manifest.publish_id}" if self._update else "none"
            asked = publish_id or ""
            raise EngineRefused(f"no publish {asked} has begun on these engines; under way is {under_way}")
        return self._update

    def _alive(self) -> tuple[str, ...]:
        return tuple(engine_id for engine_id, engine in self._engines.items() if engine.life.alive)

    def _updating(self) -> tuple[str, ...]:
        return tuple(
            engine_id for engine_id, engine in self._engines.items() if engine.life.status.phase is EnginePhase.UPDATING
        )

    def _left(self) -> tuple[str, ...]:
        if not self._alive():
            raise NoEngineLeft(f"no engine is alive: {self._reasons(tuple(self._engines))}")
        return self._alive()

    def _left_updating(self, what: str) -> tuple[str, ...]:
        if not self._updating():
            raise NoEngineLeft(f"no engine {what}: {self._reasons(tuple(self._engines))}")
        return self._updating()

    def _reasons(self, engine_ids: Sequence[str]) -> str:
        statuses = [self._engines[engine_id].life.status for engine_id in engine_ids]
        return "; ".join(f"{s.engine_id} is {s.phase} ({s.reason})" for s in statuses) or "there are none"

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


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
