"""Runs a reward over the samples of a rollout: one that fails or hangs costs its sample, never the run."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.rewards.registry import RewardFunction
from workers.batch import Prompt, Sample

CONCURRENCY = 32
"""Samples judged at once."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one sample: its reward, or why it has none."""

    reward: float | None
    timed_out: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One response to be judged."""

    prompt: Prompt
    response: str
    sample: Sample


async def judge(
    reward: RewardFunction, items: Sequence[Item], timeout_s: float, places: asyncio.Semaphore
) -> list[Judged]:
    """Judge every item, in order, each within `timeout_s` of its own start. `places` bounds how many at once.

    Plain functions run in threads. One that hangs keeps its thread (Python cannot end it) but not its place: the
    others go on, and the thread does not keep the process alive.
    """

    async def one(item: Item) -> Judged:
        async with places:
            return await _judge_one(reward, item, timeout_s)

    return list(await asyncio.gather(*(one(item) for item in items)))


async def _judge_one(reward: RewardFunction, item: Item, timeout_s: float) -> Judged:
    arguments = (item.prompt, item.response, item.sample.response_ids, item.sample)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(reward):
                value = await reward(*arguments)
            else:
                value = await _in_thread(lambda: reward(*arguments))
                if inspect.isawaitable(value):
                    value = await value
        return _accept(value)
    except TimeoutError:
        if limit.expired():
            return Judged(None, timed_out=True)
        return Judged(None, error=traceback.format_exc())
    except asyncio.CancelledError:
        raise
    except BaseException:  # an exit would end the event loop, and nobody would be told
        return Judged(None, error=traceback.format_exc())


def _accept(value: Any) -> Judged:
    if value is None:
        return Judged(None)
    if not isinstance(value, numbers.Real):
        return Judged(None, error=f"the reward is a {type(value).__name__}, not a number: {value!r}")
    number = float(value)
    if not math.isfinite(number):
        return Judged(None, error=f"the reward is {number}")
    return Judged(number)


def _in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    """The result of `function` run in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = RuntimeError(f"the reward function raised {type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future
