"""Responses that a publish cuts off: the next weights go on with them, or begin them anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from orchestrator.rollouts.continuing import Continuing, TooStale
from orchestrator.rollouts.engine_lanes import CallLimits, EngineLost, NoEngineServes
from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult

SAMPLING = SamplingConfig(max_response_len=6)
REQUEST = GenerateRequest("7/0", (2, 3), 11)


def version(number: int) -> WeightId:
    return WeightId(1, number)


class Engine:
    """One engine that writes its version as every token, one for each turn that a test gives it."""

    def __init__(self) -> None:
        self.weights: WeightId | None = None
        self.asked: list[GenerateRequest] = []
        self.turns = asyncio.Semaphore(0)
        self.aborted = False
        self.lost: str | None = None

    def serving(self, weights: WeightId) -> Sequence[str]:
        return ["engine"] if self.weights == weights and self.lost is None else []

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        if self.weights != expected:
            raise EngineRefused(f"serves {self.weights}")
        (request,) = requests
        self.asked.append(request)
        tokens: list[int] = []
        while True:
            await self.turns.acquire()
            if self.lost is not None:
                raise EngineLost(self.lost)
            if self.aborted:
                break
            tokens.append(expected.version)
            if len(tokens) == request.room(sampling):
                break
        reason: Any = "abort" if self.aborted else "length"
        logprobs = tuple(-1.0 * token for token in tokens)
        return [GenerateResult(request.request_id, tuple(tokens), logprobs, reason, (expected,))]

    async def write(self, tokens: int) -> None:
        for _ in range(tokens):
            self.turns.release()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Run:
    """A response that is wanted, and the publishes that come in between."""

    def __init__(self, continues: bool = True, too_old: Callable[[int], bool] = lambda version: False) -> None:
        self.engine = Engine()
        self.stranded: list[NoEngineServes] = []
        self.asks = Continuing(
            self.engine, CallLimits(1, 8, 8), continues=continues, too_old=too_old, stranded=self.stranded.append
        )

    async def publish(self, number: int) -> None:
        """As the fleet does: hold, pause, flush, commit."""
        self.asks.hold()
        self.engine.aborted = True
        await self.engine.write(1)
        self.engine.weights = version(number)
        self.engine.aborted, self.engine.turns, self.engine.lost = False, asyncio.Semaphore(0), None
        self.asks.serve(version(number))
        await settle()

    def ask(self) -> asyncio.Task[GenerateResult]:
        return asyncio.ensure_future(self.asks.ask(0, REQUEST, SAMPLING))


def go(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 10))


def test_the_next_weights_go_on_where_the_former_were_cut_off() -> None:
    async def body() -> None:
        run = Run()
        await run.publish(3)
        response = run.ask()
        await settle()
        await run.engine.write(2)
        await run.publish(4)
        await run.engine.write(1)
        await run.publish(5)
        await run.engine.write(9)
        result = await response
        assert result.response_ids == (3, 3, 4, 5, 5, 5)
        assert result.logprobs == (-3.0, -3.0, -4.0, -5.0, -5.0, -5.0)
        assert (result.versions, result.handovers) == ((version(3), version(4), version(5)), (2, 3))
        assert (result.request_id, result.finish_reason) == ("7/0", "length")
        asked = run.engine.asked
        assert [request.prompt_ids for request in asked] == [(2, 3), (2, 3, 3, 3), (2, 3, 3, 3, 4)]
        assert [request.room(SAMPLING) for request in asked] == [6, 4, 3]
        assert len({request.seed for request in asked}) == 3

    go(body())


def test_where_a_response_must_be_of_one_version_it_begins_anew() -> None:
    async def body() -> None:
        run = Run(continues=False)
        await run.publish(3)
        response = run.ask()
        await settle()
        await run.engine.write(2)
        await run.publish(4)
        await run.engine.write(9)
        result = await response
        assert (result.response_ids, result.versions) == ((4,) * 6, (version(4),))
        assert run.engine.asked == [REQUEST, REQUEST]

    go(body())


def test_a_version_that_wrote_nothing_is_no_behaviour_version() -> None:
    async def body() -> None:
        run = Run()
        await run.publish(3)
        response = run.ask()
        await settle()
        await run.publish(4)
        await run.engine.write(9)
        assert (await response).versions == (version(4),)
        assert run.engine.asked == [REQUEST, REQUEST]

    go(body())


def test_nothing_is_asked_while_weights_are_under_way() -> None:
    async def body() -> None:
        run = Run()
        before = run.ask()
        await settle()
        assert run.asks.waits
        await run.publish(3)
        run.asks.hold()
        during = run.ask()
        await settle()
        assert len(run.engine.asked) == 1
        await run.publish(4)
        await run.engine.write(99)
        assert {len((await one).response_ids) for one in (before, during)} == {6}
        assert run.stranded == []

    go(body())


def test_what_was_begun_by_weights_that_are_too_old_by_now_is_given_up() -> None:
    async def body() -> None:
        run = Run(too_old=lambda number: number < 4)
        await run.publish(3)
        response = run.ask()
        await settle()
        await run.engine.write(1)
        await run.publish(4)
        with pytest.raises(TooStale, match=r"7/0 was begun by 1\.3"):
            await response

    go(body())


def test_an_abort_that_no_publish_caused_is_an_answer() -> None:
    async def body() -> None:
        run = Run()
        await run.publish(3)
        response = run.ask()
        await settle()
        run.engine.aborted = True
        await run.engine.write(1)
        assert (await response).finish_reason == "abort"

    go(body())


def test_without_an_engine_it_says_so_and_waits_for_the_next_publish_of_the_same_weights_too() -> None:
    async def body() -> None:
        run = Run()
        await run.publish(3)
        response = run.ask()
        await settle()
        run.engine.lost = "the node went away"
        await run.engine.write(1)
        (error,) = run.stranded
        assert "the node went away" in str(error)
        assert not response.done()
        await run.publish(3)
        await run.engine.write(9)
        assert (await response).response_ids == (3,) * 6
        assert len(run.stranded) == 1

    go(body())
