"""Which engines a run has: who sits where, who is alive, and who takes the seat of one that died.

A seat is a place in the cluster. Engines are assigned work in the order of their seats, so that a replacement does
what its predecessor would have done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from state.engine_life import EngineLife, EnginePhase, EngineStatus, EngineTransition
from state.errors import SlotwiseError
from state.slots import WeightId
from workers.rollout.protocol import EngineDied


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
class Replacements:
    """How dead engines are replaced: `start(seat, index)` begins to start engine number `index` of the run in the
    place of one that died; `budget` of them in all."""

    start: Callable[[int, int], EngineLink]
    budget: int


@dataclass(slots=True)
class _Engine:
    link: EngineLink
    life: EngineLife
    seat: int


class Roster:
    """Lives on one event loop. `record` is told each transition of an engine's life, `died` each death."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        record: Callable[[EngineTransition], None],
        died: Callable[[str, str], None],
        start_s: float,
        replacements: Replacements | None,
    ) -> None:
        self._record, self._died, self._start_s = record, died, start_s
        self._replacements = replacements
        self._engines: dict[str, _Engine] = {}
        self._seats: list[str] = []
        self._replaced = 0
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        for link in links:
            self._seats.append("")
            self._sit(link, len(self._seats) - 1)

    async def start(self) -> None:
        """Wait for the constructors of all engines; those that came up are stale."""
        await asyncio.gather(*(self._come_up(engine_id) for engine_id in self._seats))

    def life(self, engine_id: str) -> EngineLife:
        return self._engines[engine_id].life

    def statuses(self) -> tuple[EngineStatus, ...]:
        """Of every engine there ever was, the dead too."""
        return tuple(engine.life.status for engine in self._engines.values())

    def ready(self) -> tuple[str, ...]:
        """Ids of the engines that are up, in the order of their seats."""
        return tuple(e for e in self._seats if self.life(e).alive and self.life(e).status.phase != EnginePhase.STARTING)

    def updating(self) -> tuple[str, ...]:
        return tuple(e for e in self._seats if self.life(e).status.phase is EnginePhase.UPDATING)

    def serving(self, weights: WeightId) -> tuple[str, ...]:
        return tuple(e for e in self._seats if self.life(e).serves(weights))

    async def someone_ready(self) -> None:
        """Returns once an engine is up, or none will be. Waits at most as long as an engine may take to start."""
        try:
            async with asyncio.timeout(self._start_s):
                while not self.ready() and self._starting:
                    await asyncio.wait(list(self._starting.values()), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return

    async def call(self, engine_id: str, verb: str, *args: Any) -> Any:
        """What the engine answers or raises; `EngineGone` when it is dead, which it is from now on."""
        try:
            return await self._engines[engine_id].link.call(verb, *args)
        except (EngineGone, EngineDied) as error:
            self.bury(engine_id, in_words(error))
            raise EngineGone(str(error)) from error

    async def ask(self, engine_id: str, verb: str, *args: Any, limit_s: float) -> Any:
        """The answer, or the error that came instead of it."""
        try:
            return await asyncio.wait_for(self.call(engine_id, verb, *args), limit_s)
        except TimeoutError:
            return TimeoutError(f"{engine_id} did not answer {verb} within {limit_s:g} s")
        except Exception as error:
            return error

    async def each(self, engine_ids: Sequence[str], verb: str, *args: Any, limit_s: float) -> dict[str, Any]:
        """Answers or errors by engine, all asked at once."""
        answers = await asyncio.gather(*(self.ask(e, verb, *args, limit_s=limit_s) for e in engine_ids))
        return dict(zip(engine_ids, answers, strict=True))

    def bury(self, engine_id: str, reason: str) -> None:
        """The engine is dead and killed. Another takes its seat while the budget lasts."""
        engine = self._engines[engine_id]
        if not engine.life.alive:
            return
        engine.life.die(reason)
        engine.link.kill()
        self._died(engine_id, reason)
        if self._replacements is not None and not self._closed and self._replaced < self._replacements.budget:
            self._replaced += 1
            index = len(self._engines)
            successor = self._sit(self._replacements.start(engine.seat, index), engine.seat)
            task = asyncio.get_running_loop().create_task(self._come_up(successor))
            self._starting[successor] = task
            task.add_done_callback(lambda _: self._starting.pop(successor, None))

    def reasons(self) -> str:
        """What became of every engine, in words."""
        words = "; ".join(f"{s.engine_id} is {s.phase} ({s.reason})" for s in self.statuses()) or "there are none"
        spent = f"; {self._replaced} of at most {self._replacements.budget} replaced" if self._replacements else ""
        return words + spent

    def close(self, reason: str) -> None:
        """End every engine's process, for good. Waits for nothing."""
        self._closed = True
        for task in self._starting.values():
            task.cancel()
        for engine_id in self._seats:
            self.bury(engine_id, reason)

    def _sit(self, link: EngineLink, seat: int) -> str:
        self._engines[link.engine_id] = _Engine(link, EngineLife(link.engine_id, self._record), seat)
        self._seats[seat] = link.engine_id
        return link.engine_id

    async def _come_up(self, engine_id: str) -> None:
        answer = await self.ask(engine_id, "view", limit_s=self._start_s)
        if isinstance(answer, Exception):
            self.bury(engine_id, in_words(answer))
        elif self.life(engine_id).alive:
            self.life(engine_id).started()


def in_words(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
