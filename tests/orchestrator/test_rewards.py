"""Rewards: what the registered ones give, and that a bad one costs its sample and never the run."""

import asyncio
import threading
from typing import Any

import pytest

from orchestrator.options.imports import UnknownName
from orchestrator.rewards.registry import REWARDS, RewardFunction, exact_match, largest_digit, resolve_reward
from orchestrator.rewards.scoring import CONCURRENCY, Item, Judged, judge
from state.slots import WeightId
from workers.batch import FinishReason, Prompt, Sample

PROMPT = Prompt(group_id=0, ids=(5, 9, 3, 12), text="3 7 1 =", label="7")


def sample(index: int = 0, finish_reason: FinishReason = "stop") -> Sample:
    return Sample(0, index, PROMPT.ids, (9, 1), (0.0, 0.0), (1, 1), (WeightId(0, 0),), 0, finish_reason)


def run(reward: RewardFunction, count: int = 1, timeout_s: float = 20.0) -> list[Judged]:
    items = [Item(PROMPT, "7", sample(index)) for index in range(count)]
    return asyncio.run(judge(reward, items, timeout_s, asyncio.Semaphore(CONCURRENCY)))


@pytest.mark.parametrize(
    ("response", "finish_reason", "expected"),
    [
        ("7", "stop", 1.0),
        ("7", "length", 0.5),
        ("7 7", "stop", 0.5),
        ("7 1 2 3", "length", 0.5),
        ("3", "stop", 0.5),
        ("3", "length", 0.0),
        ("3 7", "stop", 0.0),
        ("<pad> 7", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_largest_digit_is_the_share_of_right_tokens(
    response: str, finish_reason: FinishReason, expected: float
) -> None:
    assert largest_digit(PROMPT, response, (), sample(finish_reason=finish_reason)) == expected


def test_exact_match_ignores_spaces_around() -> None:
    assert exact_match(PROMPT, " 7\n", (), sample()) == 1.0
    assert exact_match(PROMPT, "77", (), sample()) == 0.0


def test_names_and_import_paths_resolve_and_others_are_refused() -> None:
    assert resolve_reward("largest_digit") is REWARDS["largest_digit"]
    assert resolve_reward("orchestrator.rewards.registry:exact_match") is exact_match
    with pytest.raises(UnknownName, match="did you mean 'exact_match'"):
        resolve_reward("exactmatch")


def test_rewards_come_back_in_order_for_plain_and_async_functions() -> None:
    async def later(prompt: Prompt, response: str, ids: tuple[int, ...], own: Sample) -> float:
        return own.index / 2

    def now(prompt: Prompt, response: str, ids: tuple[int, ...], own: Sample) -> float:
        assert (prompt, response, ids) == (PROMPT, "7", (9, 1))
        return own.index / 2

    for reward in (later, now):
        assert run(reward, count=100) == [Judged(index / 2) for index in range(100)]


def test_a_function_that_returns_an_awaitable_is_awaited() -> None:
    async def inner() -> float:
        return 0.25

    assert run(lambda *_: inner()) == [Judged(0.25)]


def test_one_failing_sample_costs_that_sample_only() -> None:
    def reward(prompt: Prompt, response: str, ids: tuple[int, ...], own: Sample) -> float:
        if own.index == 1:
            raise RuntimeError("no verdict")
        return 1.0

    first, second, third = run(reward, count=3)
    assert (first, third) == (Judged(1.0), Judged(1.0))
    assert second.reward is None
    assert second.error is not None
    assert "no verdict" in second.error


def test_a_function_that_exits_is_an_error_of_its_sample() -> None:
    def reward(*_: Any) -> float:
        raise SystemExit(3)

    async def patient(*_: Any) -> float:
        raise SystemExit(3)

    for function in (reward, patient):
        (judged,) = run(function)
        assert judged.error is not None
        assert "SystemExit" in judged.error


def test_hanging_plain_functions_time_out_and_do_not_hold_up_the_others() -> None:
    release = threading.Event()

    def reward(prompt: Prompt, response: str, ids: tuple[int, ...], own: Sample) -> float:
        if own.index < CONCURRENCY:
            release.wait(timeout=60)
        return 1.0

    judged = run(reward, count=CONCURRENCY + 20, timeout_s=1.0)
    release.set()
    assert all(one == Judged(None, timed_out=True) for one in judged[:CONCURRENCY])
    assert judged[CONCURRENCY:] == [Judged(1.0)] * 20


def test_waiting_for_a_place_is_not_counted_as_the_samples_time() -> None:
    async def reward(*_: Any) -> float:
        await asyncio.sleep(0.03)
        return 1.0

    count = 40 * CONCURRENCY
    assert run(reward, count, timeout_s=1.0) == [Judged(1.0)] * count


def test_a_hanging_coroutine_times_out() -> None:
    async def reward(*_: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert run(reward, timeout_s=0.05) == [Judged(None, timed_out=True)]


def test_a_timeout_inside_the_function_is_its_error_not_ours() -> None:
    def reward(*_: Any) -> float:
        raise TimeoutError("the judge did not answer")

    (judged,) = run(reward)
    assert not judged.timed_out
    assert judged.error is not None
    assert "the judge did not answer" in judged.error


@pytest.mark.parametrize(("value", "expected"), [(0.0, 0.0), (0, 0.0), (True, 1.0), (None, None)])
def test_zero_is_a_reward_and_none_is_not(value: Any, expected: float | None) -> None:
    assert run(lambda *_: value) == [Judged(expected)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", {"score": 0.0}])
def test_what_is_no_finite_number_is_an_error(value: Any) -> None:
    (judged,) = run(lambda *_: value)
    assert judged.reward is None
    assert judged.error is not None
