"""Groups of a rollout under load: who is asked when, and what becomes of groups that are refused, late or cut off."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.dispatch import shards
from orchestrator.rollouts.buffer import Rollout
from orchestrator.rollouts.engine_lanes import EngineFailed, EngineLost
from orchestrator.rollouts.generation import Ask, WrongTrajectory, one_response
from orchestrator.rollouts.pipeline import FilterFailed, GenerateFailed, RolloutTimeout
from state.slots import WeightId
from tests.orchestrator.rollouts.test_pipeline import (
    EOS,
    TOKENIZER_DIR,
    WEIGHTS,
    Shown,
    StandInEngines,
    pipeline,
    result,
)
from workers.batch import Prompt, Sample, Trajectory, VersionSpan
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult

HERE = "tests.orchestrator.rollouts.test_groups"
BATCH = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "timeout_s": 20.0}


def make(engines: StandInEngines, reward: str = f"{HERE}:seed_reward", **rollout: Any) -> Rollout:
    made = pipeline(engines, Shown(), reward={"name": reward}, rollout=BATCH | rollout)
    return asyncio.run(asyncio.wait_for(made.generate(3, WEIGHTS), 20))


def groups(rollout: Rollout) -> list[int]:
    return [sample.group_id for sample in rollout.samples if sample.index == 0]


def seed_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    return float(sample.seed % 7)


def parity_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    """Groups of even ids have equal rewards."""
    return float(sample.index * (sample.group_id % 2))


def equal_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    return 1.0


class Slow(StandInEngines):
    """Each call takes a turn of an event that the test fires; it notes the calls that are open at once."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.open: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def generate(self, engine_id: str, *arguments: Any) -> Sequence[GenerateResult]:
        self.open[engine_id] = self.open.get(engine_id, 0) + 1
        self.most[engine_id] = max(self.most.get(engine_id, 0), self.open[engine_id])
        for _ in range(3):
            await asyncio.sleep(0)
        results = await super().generate(engine_id, *arguments)
        self.open[engine_id] -= 1
        return results


# --- calls


def test_an_engine_has_its_next_call_before_it_has_ended_one_and_never_more() -> None:
    engines = Slow(["a", "b"])
    rollout = make(engines, rollout_batch_size=12, requests_per_call=2)
    assert engines.most == {"a": 2, "b": 2}
    assert max(len(ids) for _, ids, _, _ in engines.asked) == 2
    assert len(rollout.samples) == 36


@pytest.mark.parametrize(("requests_per_call", "calls"), [(None, [3] * 12), (1, [1] * 36)])
def test_an_engine_that_batches_by_itself_is_kept_full_and_no_call_waits_for_another(
    requests_per_call: int | None, calls: list[int]
) -> None:
    """It generates 6 at once and has as many again. The very first call takes as long as all others."""
    open_now: set[str] = set()
    most: list[int] = []

    class Batching(StandInEngines):
        async def generate(self, engine_id: str, requests: Sequence[GenerateRequest], *rest: Any) -> Any:
            open_now.update(one.request_id for one in requests)
            most.append(len(open_now))
            results = await super().generate(engine_id, requests, *rest)
            while requests[0].request_id == "0/0" and len(self.asked) < len(calls):
                await asyncio.sleep(0)
            open_now.difference_update(one.request_id for one in requests)
            return results

    engines = Batching(["a"])
    shape = {"rollout_batch_size": 12, "engine": "sglang", "max_batch_size": 6, "requests_per_call": requests_per_call}
    assert len(make(engines, **shape).samples) == 36
    assert [len(ids) for _, ids, _, _ in engines.asked] == calls
    assert max(most) == 12


def test_the_first_call_is_sent_before_the_last_request_is_made_and_every_call_is_full() -> None:
    begun: list[int] = []

    class Early(StandInEngines):
        async def generate(self, engine_id: str, requests: Sequence[GenerateRequest], *rest: Any) -> Any:
            begun.append(len(SEEN))
            return await super().generate(engine_id, requests, *rest)

    SEEN.clear()
    engines = Early(["a"])
    shape = {"rollout_batch_size": 200, "n_samples_per_prompt": 1, "requests_per_call": 50}
    make(engines, **shape, generate=f"{HERE}:seen_response")
    assert begun[0] < 120
    assert [len(ids) for _, ids, _, _ in engines.asked] == [50] * 4


SEEN: list[int] = []


async def seen_response(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    SEEN.append(prompt.group_id)
    return await one_response(prompt, ask, sampling, tokenizer)


@pytest.mark.parametrize("requests_per_call", [1, 2, 5, None])
def test_a_rollout_does_not_depend_on_how_requests_share_calls(requests_per_call: int | None) -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        return result(request, ids=(2 + request.seed % 10, EOS))

    whole = make(StandInEngines(["a"], answer)).samples
    assert make(StandInEngines(["a", "b"], answer), requests_per_call=requests_per_call).samples == whole


def test_a_group_is_always_for_the_same_engine_however_calls_are_cut() -> None:
    engines = StandInEngines(["a", "b"])
    make(engines, requests_per_call=2)
    asked = {(engine, int(one.partition("/")[0])) for engine, ids, _, _ in engines.asked for one in ids}
    assert asked == {("a", 0), ("b", 1), ("a", 2), ("b", 3)}


@pytest.mark.parametrize("error", [EngineLost("a is gone"), EngineRefused("a is stale")])
def test_what_was_queued_for_an_engine_that_left_service_is_answered_by_the_others(error: Exception) -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        if engine == "a":
            raise error
        return result(request)

    rollout = make(StandInEngines(["a", "b"], answer), requests_per_call=1)
    assert len(rollout.samples) == 12


def test_an_engine_that_fails_and_goes_on_ends_the_rollout_with_its_words() -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        raise RuntimeError("out of memory")

    with pytest.raises(EngineFailed, match="a failed over 12 requests: RuntimeError: out of memory"):
        make(StandInEngines(["a"], answer))


# --- the filter


def test_refused_groups_are_made_up_for_by_further_prompts_in_their_order() -> None:
    rollout = make(StandInEngines(["a"]), f"{HERE}:parity_reward", filter="unequal_rewards")
    assert groups(rollout) == [1, 3, 5, 7]
    assert rollout.stats["rollout/prompts"] == 8
    assert rollout.stats["filter/refused"] == 4
    assert rollout.stats["filter/refused_but_used"] == 0
    assert rollout.cursor_after["next_group_id"] == 8


def test_which_groups_are_trained_on_does_not_depend_on_the_order_in_which_they_end() -> None:
    class Backwards(StandInEngines):
        async def generate(self, engine_id: str, requests: Any, *rest: Any) -> Sequence[GenerateResult]:
            for _ in range(40 - 4 * int(requests[0].request_id.partition("/")[0])):
                await asyncio.sleep(0)
            return await super().generate(engine_id, requests, *rest)

    calls = {"requests_per_call": 3, "filter": "unequal_rewards"}
    there, back = (
        make(kind(["a", "b", "c"]), f"{HERE}:parity_reward", **calls) for kind in (StandInEngines, Backwards)
    )
    assert groups(back) == groups(there)
    assert back.cursor_after == there.cursor_after


def test_a_filter_that_refuses_everything_is_bounded_and_the_batch_is_full_all_the_same() -> None:
    rollout = make(StandInEngines(["a"]), f"{HERE}:equal_reward", filter="unequal_rewards", max_prompts_factor=2.5)
    assert rollout.stats["rollout/prompts"] == 10
    assert rollout.stats["filter/refused"] == 10
    assert rollout.stats["filter/refused_but_used"] == 4
    assert groups(rollout) == [0, 1, 2, 3]


def no_second_group(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    return prompt.group_id != 1


def test_a_filter_can_be_a_function_of_the_users() -> None:
    assert groups(make(StandInEngines(["a"]), filter=f"{HERE}:no_second_group")) == [0, 2, 3, 4]


# --- lateness


class Stuck(StandInEngines):
    """Engine `a` never answers what contains sample 1/0."""

    async def generate(self, engine_id: str, requests: Any, *rest: Any) -> Sequence[GenerateResult]:
        results = await super().generate(engine_id, requests, *rest)
        if engine_id == "b" and any(one.request_id == "1/0" for one in requests):
            await asyncio.Event().wait()
        return results


def test_a_group_with_a_straggler_is_left_out_and_told_and_another_takes_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = {"group_timeout_s": 0.4, "group_retries": 0, "requests_per_call": 1}
    rollout = make(Stuck(["a", "b"]), **late)
    assert groups(rollout) == [0, 2, 3, 4]
    assert rollout.stats["rollout/groups_timed_out"] == 1
    assert "group 1 is left out: no response to 1/0 within 0.4 s, asked 1 times" in caplog.text


def test_a_late_group_may_be_asked_again_of_the_next_engine() -> None:
    rollout = make(Stuck(["a", "b"]), group_timeout_s=0.4, group_retries=1, requests_per_call=1)
    assert groups(rollout) == [0, 1, 2, 3]
    assert rollout.stats["rollout/groups_timed_out"] == 0
    assert rollout.stats["rollout/asked_again"] == 1


def test_when_every_group_is_late_the_rollout_fails() -> None:
    class Silent(StandInEngines):
        async def generate(self, *_: Any) -> Sequence[GenerateResult]:
            await asyncio.Event().wait()
            return []

    with pytest.raises(RolloutTimeout, match=r"none of 12 groups came within rollout\.group_timeout_s = 0\.01 s"):
        make(Silent(["a"]), group_timeout_s=0.01, group_retries=0)


# --- aborts


def aborting(times: int) -> Callable[[str, GenerateRequest], GenerateResult]:
    """Sample 1/0 is cut off this often."""
    left = [times]

    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        if request.request_id == "1/0" and left[0]:
            left[0] -= 1
            return result(request, ids=(5,), finish_reason="abort")
        return result(request, ids=(2 + request.seed % 10, EOS))

    return answer


def test_a_response_that_was_cut_off_is_asked_for_again_and_is_what_it_would_have_been() -> None:
    again = make(StandInEngines(["a"], aborting(1)))
    assert again.samples == make(StandInEngines(["a"], aborting(0))).samples
    assert again.stats["rollout/asked_again"] == 1
    assert again.stats["rollout/aborted"] == 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_response_that_two_versions_wrote_keeps_its_budget_and_log_probs_and_may_train_on_the_newer_part_only(
    masked: bool,
) -> None:
    former, lengths = WeightId(WEIGHTS.incarnation, WEIGHTS.version - 1), (5, 10)

    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        ids, logprobs = tuple(range(2, 12)), tuple(-0.1 * place for place in range(10))
        return result(request, ids=ids, logprobs=logprobs, versions=(former, WEIGHTS), handovers=lengths[:1])

    rollout = make(StandInEngines(["a"], answer), max_response_len=10, mask_former_versions=masked)
    for sample in rollout.samples:
        assert len(sample.response_ids) == len(sample.logprobs) == len(sample.loss_mask) == 10
        assert sample.logprobs == tuple(-0.1 * place for place in range(10))
        assert sample.loss_mask == ((0,) * 5 if masked else (1,) * 5) + (1,) * 5
        assert sample.spans == (VersionSpan(former, 0, 5), VersionSpan(WEIGHTS, 5, 10))
        assert sample.versions == (former, WEIGHTS)


def test_a_response_cut_off_too_often_comes_back_whole_and_is_not_trained_on() -> None:
    rollout = make(StandInEngines(["a"], aborting(9)), group_retries=2)
    (cut,) = [sample for sample in rollout.samples if sample.finish_reason == "abort"]
    assert (cut.group_id, cut.index, cut.response_ids, cut.loss_mask, cut.reward) == (1, 0, (5,), (1,), None)
    assert len(rollout.samples) == 12
    (shard,) = shards(0, rollout.samples, 1, 1)
    assert len(shard.samples) == 11
    assert rollout.stats["reward/none_ratio"] == pytest.approx(1 / 12)


def exiting_filter(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    sys.exit("no such column")


def broken_filter(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    raise KeyError("difficulty")


@pytest.mark.parametrize(
    ("function", "says"),
    [("broken_filter", "KeyError: 'difficulty'"), ("exiting_filter", "SystemExit: no such column")],
)
def test_a_filter_that_raises_is_named(function: str, says: str) -> None:
    with pytest.raises(FilterFailed, match=f"^rollout.filter {HERE}:{function} raised on group 0: {says}$"):
        make(StandInEngines(["a"]), filter=f"{HERE}:{function}")


# --- generate functions


async def fails_once(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    answer = await ask(prompt.ids)
    if ask.request_id == "2/1":
        raise ValueError("the tool is broken")
    return Trajectory(answer.response_ids, answer.logprobs, (1,) * len(answer.response_ids), answer.finish_reason)


async def exits_once(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    if ask.request_id == "2/1":
        sys.exit("no tool")
    return await fails_once(prompt, ask, sampling, tokenizer)


async def returns_nothing_once(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Any:
    return None if ask.request_id == "2/1" else await fails_once(prompt, ask, sampling, tokenizer)


async def returns_words_once(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    made = await exits_once(prompt, ask, sampling, tokenizer) if ask.request_id != "2/1" else None
    return made or Trajectory(("seven",), (0.0,), (0,), "stop")  # type: ignore[arg-type]


async def says_what_no_model_knows(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    return Trajectory((16,), (0.0,), (0,), "stop")


async def always_fails(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    raise ValueError("the tool is broken")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fails_once", "ValueError: the tool is broken"),
        ("exits_once", "SystemExit: no tool"),
        ("returns_nothing_once", f"rollout.generate {HERE}:returns_nothing_once returned None, which is no Trajectory"),
        ("returns_words_once", "TypeError: "),
    ],
)
def test_a_generate_function_that_fails_on_a_sample_costs_that_sample(function: str, says: str) -> None:
    rollout = make(StandInEngines(["a"]), generate=f"{HERE}:{function}")
    assert [(s.group_id, s.index) for s in rollout.samples if s.reward is None] == [(2, 1)]
    assert rollout.stats["rollout/generate_errors"] == 1
    assert says in rollout.stats["rollout/first_error"]


def test_tokens_outside_the_vocabulary_of_the_model_never_reach_it() -> None:
    made = pipeline(
        StandInEngines(["a"]),
        model={"tokenizer": TOKENIZER_DIR, "config": {"vocab_size": 16}},
        rollout=BATCH | {"generate": f"{HERE}:says_what_no_model_knows"},
    )
    with pytest.raises(WrongTrajectory, match="token 0 has id 16, but the model's vocab_size is 16"):
        asyncio.run(asyncio.wait_for(made.generate(3, WEIGHTS), 20))


def test_a_generate_function_that_always_fails_ends_the_rollout_with_the_error() -> None:
    with pytest.raises(GenerateFailed, match=r"(?s)failed for all 12 samples.*the tool is broken"):
        make(StandInEngines(["a"]), generate=f"{HERE}:always_fails")
