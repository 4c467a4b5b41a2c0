"""The queue of each engine: requests of all groups, sent in calls that keep the engine busy.

An engine that generates what one call asks for, and then the next, is asked in large calls, and has the next one before
it has ended one. An engine that batches whatever it has is asked for the samples of each prompt by themselves, which
are of use only together, and has more of them than it generates at once: no call waits for another.

Which engine a request is for is decided by its group alone. How requests share calls depends on the moment, but no
response does: a sample is a function of its prompt, its seed and the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.rollouts.requests import check_answers
from state.errors import SlotwiseError
from state.slots import WeightId
from workers.config import RolloutConfig, SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult

CALLS_AT_ONCE = 2
"""The second call waits where the engine is, which goes on with it the moment it has ended the first."""
QUEUED = 2
"""Requests that a server has, as a multiple of those that it generates at once: a place that becomes free is taken in
the same step, also while others of the same call are not done."""


class EngineLost(SlotwiseError):
    """An engine died over its requests. They are answered by the engines that are left."""


class EngineFailed(SlotwiseError):
    """An engine that goes on could not answer its requests."""


class NoEngineServes(SlotwiseError):
    """No engine holds the weights that responses are wanted from."""


class Engines(Protocol):
    """The engines as a rollout needs them."""

    def serving(self, weights: WeightId) -> Sequence[str]:
        """Ids of the engines proven to hold `weights`, always in the same order."""
        ...

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        """One result per request. Raises `EngineLost` when the engine died."""
        ...


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What one engine is asked at once: `calls` calls of at most `requests` requests each, and `in_flight` in all."""

    requests: int
    calls: int
    in_flight: int

    @staticmethod
    def of(rollout: RolloutConfig) -> CallLimits:
        match rollout.engine:
            case "embedded":
                requests = rollout.requests_per_call or rollout.max_batch_size
                return CallLimits(requests, CALLS_AT_ONCE, CALLS_AT_ONCE * requests)
            case "sglang":
                in_flight = rollout.max_batch_size * QUEUED
                return CallLimits(rollout.requests_per_call or rollout.n_samples_per_prompt, in_flight, in_flight)


@dataclass(eq=False, slots=True)
class _Wanted:
    request: GenerateRequest
    sampling: SamplingConfig
    answer: asyncio.Future[GenerateResult]


@dataclass(slots=True)
class _Lane:
    """One engine's queue, and its calls with their requests. `lost` says why nothing is asked of it any more."""

    queue: list[_Wanted] = field(default_factory=list)
    calls: dict[asyncio.Task[None], int] = field(default_factory=dict)
    lost: str | None = None
    pumping: bool = False


class Lanes:
    """The engines that hold `weights`, for one rollout."""

    def __init__(self, engines: Engines, weights: WeightId, limits: CallLimits) -> None:
        self._engines, self._weights, self._limits = engines, weights, limits
        self._lanes: dict[str, _Lane] = {}
        self._filling = self._closed = False

    @contextmanager
    def filling(self) -> Iterator[None]:
        """While more requests are about to come, a call waits until it is full, or a former one has ended."""
        self._filling = True
        try:
            yield
        finally:
            self._filling = False
            for engine_id, lane in self._lanes.items():
                self._pump_soon(engine_id, lane)

    def engine_of(self, number: int) -> str:
        """Groups go round robin over the engines that are left, always the same way."""
        serving = [e for e in self._engines.serving(self._weights) if self._lane(e).lost is None]
        if not serving:
            lost = "; ".join(f"{e}: {lane.lost}" for e, lane in sorted(self._lanes.items()) if lane.lost is not None)
            raise NoEngineServes(f"no engine serves weights {self._weights}; lost over this rollout: {lost or 'none'}")
        return serving[number % len(serving)]

    async def ask(self, number: int, request: GenerateRequest, sampling: SamplingConfig) -> GenerateResult:
        """The answer to a request of group `number`. If its engine is lost, another is asked: equal weights and an
        equal seed give an equal answer."""
        while True:
            engine_id = self.engine_of(number)
            wanted = _Wanted(request, sampling, asyncio.get_running_loop().create_future())
            lane = self._lane(engine_id)
            lane.queue.append(wanted)
            if len(lane.queue) >= self._limits.requests:
                self._pump(engine_id, lane)
            elif not self._filling:
                self._pump_soon(engine_id, lane)
            try:
                return await wanted.answer
            except EngineLost:
                continue

    def close(self) -> None:
        """Wait for no answer any more, and ask for none."""
        self._closed = True
        for lane in self._lanes.values():
            for call in lane.calls:
                call.cancel()

    def _lane(self, engine_id: str) -> _Lane:
        return self._lanes.setdefault(engine_id, _Lane())

    def _pump_soon(self, engine_id: str, lane: _Lane) -> None:
        """Once for all that is asked in this turn of the loop, so that it shares calls."""
        if not lane.pumping:
            lane.pumping = True
            asyncio.get_running_loop().call_soon(self._pump_rest, engine_id, lane)

    def _pump_rest(self, engine_id: str, lane: _Lane) -> None:
        lane.pumping = False
        self._pump(engine_id, lane)

    def _pump(self, engine_id: str, lane: _Lane) -> None:
        if self._closed or not self._room(lane):
            return
        lane.queue = [wanted for wanted in lane.queue if not wanted.answer.done()]
        while lane.queue and (room := self._room(lane)):
            sampling = lane.queue[0].sampling
            alike = [wanted for wanted in lane.queue if wanted.sampling == sampling][:room]
            chosen = set(map(id, alike))
            lane.queue = [wanted for wanted in lane.queue if id(wanted) not in chosen]
            call = asyncio.get_running_loop().create_task(self._call(engine_id, lane, alike, sampling))
            lane.calls[call] = len(alike)
            call.add_done_callback(lambda done: self._ended(engine_id, lane, done))

    def _room(self, lane: _Lane) -> int:
        """Requests that another call may have."""
        if len(lane.calls) >= self._limits.calls:
            return 0
        return min(self._limits.requests, self._limits.in_flight - sum(lane.calls.values()))

    def _ended(self, engine_id: str, lane: _Lane, call: asyncio.Task[None]) -> None:
        del lane.calls[call]
        self._pump_soon(engine_id, lane)

    async def _call(self, engine_id: str, lane: _Lane, batch: list[_Wanted], sampling: SamplingConfig) -> None:
        requests = [wanted.request for wanted in batch]
        try:
            results = await self._engines.generate(engine_id, requests, sampling, self._weights)
            check_answers(requests, results, engine_id)
        except (EngineLost, EngineRefused) as error:
            lane.lost = str(error)
            for wanted in [*batch, *lane.queue]:
                _fail(wanted, EngineLost(str(error)))
        except Exception as error:
            failure = error
            if not isinstance(error, SlotwiseError):
                failure = EngineFailed(
                    f"{engine_id} failed over {len(batch)} requests: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
            for wanted in batch:
                _fail(wanted, failure)
        else:
            for wanted, result in zip(batch, results, strict=True):
                if not wanted.answer.done():
                    wanted.answer.set_result(result)


def _fail(wanted: _Wanted, error: Exception) -> None:
    if not wanted.answer.done():
        wanted.answer.set_exception(error)
