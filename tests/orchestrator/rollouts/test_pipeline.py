"""One rollout over engines that are stand-ins: who is asked what, and what becomes of the answers."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from orchestrator.config import Config
from orchestrator.data.source import DataError
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.rollouts.engine_lanes import EngineLost, NoEngineServes
from orchestrator.rollouts.pipeline import NothingJudged, RolloutPipeline, RolloutTimeout
from orchestrator.rollouts.requests import IncompleteRollout
from state.errors import InvariantViolation
from state.slots import WeightId
from workers.batch import Prompt, Sample
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

TOKENIZER_DIR = str(Path(__file__).parents[3] / "examples" / "quickstart")
TOKENIZER = AutoTokenizer.from_pretrained(TOKENIZER_DIR)
WEIGHTS = WeightId(0, 3)
DIGIT_7, EOS = 9, 1

Answer = Callable[[str, GenerateRequest], GenerateResult]


def result(request: GenerateRequest, ids: tuple[int, ...] = (DIGIT_7, EOS), **changes: Any) -> GenerateResult:
    values: dict[str, Any] = {
        "request_id": request.request_id,
        "response_ids": ids,
        "logprobs": tuple(-0.25 for _ in ids),
        "finish_reason": "stop",
        "versions": (WEIGHTS,),
    }
    return GenerateResult(**{**values, **changes})


class StandInEngines:
    """Engines whose answers are a function of the request; they note who was asked what."""

    def __init__(self, names: Sequence[str], answer: Answer = lambda _, request: result(request)) -> None:
        self.names, self.answer = list(names), answer
        self.asked: list[tuple[str, list[str], SamplingConfig, WeightId]] = []
        self.at_once = 0

    def serving(self, weights: WeightId) -> Sequence[str]:
        return self.names if weights == WEIGHTS else []

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        self.asked.append((engine_id, [one.request_id for one in requests], sampling, expected))
        before = len(self.asked)
        await asyncio.sleep(0)
        self.at_once = max(self.at_once, len(self.asked) - before + 1)
        return [self.answer(engine_id, request) for request in requests]


class Shown:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.records.append({"step": step, **metrics})

    def close(self) -> None: ...


def configuration(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"tokenizer": TOKENIZER_DIR},
        "data": {"generator": "largest_digit"},
        "reward": {"name": "largest_digit"},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "timeout_s": 20.0},
    }
    return Config.model_validate({**values, **sections})


def pipeline(engines: StandInEngines, shown: Shown | None = None, **sections: Any) -> RolloutPipeline:
    return RolloutPipeline(configuration(**sections), TOKENIZER, engines, shown or Shown())


def generate(engines: StandInEngines, **sections: Any) -> tuple[tuple[Sample, ...], Mapping[str, Any]]:
    rollout = asyncio.run(pipeline(engines, **sections).generate(3, WEIGHTS))
    return rollout.samples, rollout.stats


def test_there_are_exactly_n_samples_of_each_prompt_with_seeds_of_their_own() -> None:
    samples, stats = generate(StandInEngines(["a", "b"]))
    assert [(sample.group_id, sample.index) for sample in samples] == [(g, i) for g in range(4) for i in range(3)]
    assert len({sample.seed for sample in samples}) == 12
    assert stats["rollout/samples"] == 12


def test_an_engine_is_asked_with_a_seed_of_its_own_for_each_sample_and_the_same_one_in_the_next_run() -> None:
    def echo(engine: str, request: GenerateRequest) -> GenerateResult:
        return result(request, ids=tuple(2 + int(digit) for digit in str(request.seed)))

    first, again = (generate(StandInEngines(["a", "b"], echo))[0] for _ in range(2))
    assert len({sample.response_ids for sample in first}) == 12
    assert first == again


def test_the_same_run_makes_the_same_rollout_and_another_seed_another() -> None:
    first, again, other = (generate(StandInEngines(["a", "b"]), run={"seed": seed})[0] for seed in (0, 0, 1))
    assert first == again
    assert {sample.seed for sample in first}.isdisjoint(sample.seed for sample in other)


def test_a_sample_does_not_depend_on_how_many_engines_there_are() -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        return result(request, ids=(2 + request.seed % 10, EOS))

    assert generate(StandInEngines(["a"], answer))[0] == generate(StandInEngines(["a", "b", "c"], answer))[0]


def test_prompts_go_round_robin_to_the_engines_which_all_work_at_once() -> None:
    engines = StandInEngines(["a", "b"])
    generate(engines)
    assert [(engine, [one.partition("/")[0] for one in ids]) for engine, ids, _, _ in engines.asked] == [
        ("a", ["0"] * 3 + ["2"] * 3),
        ("b", ["1"] * 3 + ["3"] * 3),
    ]
    assert engines.at_once == 2
    assert {expected for *_, expected in engines.asked} == {WEIGHTS}


def test_ids_and_logprobs_are_the_engines_own() -> None:
    odd = (0, 15, 0)
    samples, _ = generate(
        StandInEngines(["a"], lambda _, one: result(one, ids=odd, logprobs=(-1.5, -2.5, -0.1), finish_reason="length"))
    )
    assert {sample.response_ids for sample in samples} == {odd}
    assert {sample.logprobs for sample in samples} == {(-1.5, -2.5, -0.1)}
    assert {sample.loss_mask for sample in samples} == {(1, 1, 1)}
    assert {sample.versions for sample in samples} == {(WEIGHTS,)}


def test_rewards_reach_the_samples_they_judge() -> None:
    samples, stats = generate(StandInEngines(["a", "b"]))
    labels = [max(sample.prompt_ids[:3]) for sample in samples]
    assert [sample.reward for sample in samples] == [1.0 if label == DIGIT_7 else 0.5 for label in labels]
    assert stats["reward/mean"] == pytest.approx(sum(s.reward for s in samples if s.reward is not None) / 12)


def test_aborted_samples_are_counted_and_have_no_reward() -> None:
    def answer(_: str, request: GenerateRequest) -> GenerateResult:
        return result(request, finish_reason="abort" if request.request_id == "1/0" else "stop")

    samples, stats = generate(StandInEngines(["a"], answer))
    assert [(s.group_id, s.index) for s in samples if s.reward is None] == [(1, 0)]
    assert stats["rollout/aborted"] == 1
    assert stats["reward/none_ratio"] == pytest.approx(1 / 12)


def failing_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    raise RuntimeError("no verdict today")


def silent_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float | None:
    return None if sample.index == 0 else 0.0


def reward_of_one_sample(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    if (sample.group_id, sample.index) != (2, 1):
        raise RuntimeError("no verdict today")
    return 0.0


def mute_reward(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> None: ...


def test_a_reward_that_fails_for_all_samples_but_one_is_counted_told_and_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("orchestrator.data.generators.reward_of_one_sample", reward_of_one_sample, raising=False)
    samples, stats = generate(
        StandInEngines(["a"]), reward={"name": "orchestrator.data.generators:reward_of_one_sample"}
    )
    assert [sample.reward for sample in samples] == [None] * 7 + [0.0] + [None] * 4
    assert (stats["reward/errors"], stats["reward/mean"]) == (11, 0.0)
    assert stats["reward/none_ratio"] == pytest.approx(11 / 12)
    assert stats["reward/first_error"] == "RuntimeError: no verdict today"
    assert "no verdict today" in caplog.text


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (failing_reward, r"none of 12 samples \(12 errors\).*first error:.*RuntimeError: no verdict today"),
        (mute_reward, r"none of 12 samples \(12 answers that were None\)"),
    ],
)
def test_a_rollout_without_one_judged_sample_ends_the_run_and_its_prompts_are_next_again(
    monkeypatch: pytest.MonkeyPatch, reward: Any, told: str
) -> None:
    monkeypatch.setattr("orchestrator.data.generators.a_reward", reward, raising=False)
    made = pipeline(StandInEngines(["a"]), reward={"name": "orchestrator.data.generators:a_reward"})
    before = made.source.state()
    with pytest.raises(NothingJudged, match=f"(?s){told}") as ended:
        asyncio.run(made.generate(3, WEIGHTS))
    assert exit_code(ended.value) == ExitCode.FAILED
    assert made.source.state() == before


def test_an_evaluation_without_one_judged_sample_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.data.generators.failing_reward", failing_reward, raising=False)
    metrics = evaluate(StandInEngines(["a"]), reward={"name": "orchestrator.data.generators:failing_reward"})
    assert metrics["eval/reward/errors"] == 5


def test_without_a_reward_nothing_needs_to_be_judged() -> None:
    samples, _ = generate(StandInEngines(["a"]), reward={})
    assert {sample.reward for sample in samples} == {None}


def test_a_sample_that_cannot_be_judged_is_counted_and_zero_is_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.data.generators.silent_reward", silent_reward, raising=False)
    samples, stats = generate(StandInEngines(["a"]), reward={"name": "orchestrator.data.generators:silent_reward"})
    assert [sample.reward for sample in samples] == [None, 0.0, 0.0] * 4
    assert stats["reward/none_ratio"] == pytest.approx(1 / 3)
    assert (stats["reward/errors"], stats["reward/mean"]) == (0, 0.0)


def test_requests_of_an_engine_that_dies_are_answered_by_the_others() -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        if engine == "a":
            raise EngineLost("a is gone")
        return result(request, ids=(2 + request.seed % 10, EOS))

    engines = StandInEngines(["a", "b"], answer)
    whole = generate(StandInEngines(["b"], answer))[0]
    assert generate(engines)[0] == whole
    assert [engine for engine, *_ in engines.asked] == ["a", "b", "b"]


def test_when_the_last_engine_dies_the_rollout_fails_naming_it() -> None:
    def answer(engine: str, request: GenerateRequest) -> GenerateResult:
        raise EngineLost(f"{engine} is gone")

    with pytest.raises(NoEngineServes, match=r"weights 0\.3; lost over this rollout: a: a is gone"):
        generate(StandInEngines(["a"], answer))


def test_only_engines_with_the_wanted_weights_are_asked() -> None:
    engines = StandInEngines(["a"])
    with pytest.raises(NoEngineServes, match=r"0\.4"):
        asyncio.run(pipeline(engines).generate(4, WeightId(0, 4)))
    assert not engines.asked


@pytest.mark.parametrize("wrong", ["missing", "other", "doubled"])
def test_answers_to_other_questions_are_refused(wrong: str) -> None:
    class Wrong(StandInEngines):
        async def generate(self, *arguments: Any) -> Sequence[GenerateResult]:
            answers = list(await super().generate(*arguments))
            if wrong == "missing":
                return answers[1:]
            return [*answers[1:], result(GenerateRequest("9/9", (1,), 0))] if wrong == "other" else answers + answers

    with pytest.raises(IncompleteRollout, match="engine a answered"):
        generate(Wrong(["a"]))


def test_an_engine_that_never_answers_ends_the_rollout_by_its_limit() -> None:
    class Silent(StandInEngines):
        async def generate(self, *_: Any) -> Sequence[GenerateResult]:
            await asyncio.Event().wait()
            return []

    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "timeout_s": 0.05}
    with pytest.raises(RolloutTimeout, match=r"rollout\.timeout_s = 0\.05 s; asked for 2 groups: 0, 1"):
        generate(Silent(["a"]), rollout=rollout)


def test_prompts_of_a_failed_rollout_are_next_again() -> None:
    engines = StandInEngines([])
    made = pipeline(engines)
    before = made.source.state()
    with pytest.raises(NoEngineServes):
        asyncio.run(made.generate(0, WEIGHTS))
    assert made.source.state() == before


def test_the_cursor_of_a_rollout_is_the_one_after_it_also_when_the_next_is_under_way() -> None:
    made = pipeline(StandInEngines(["a"]))

    async def two() -> list[int]:
        rollouts = await asyncio.gather(made.generate(0, WEIGHTS), made.generate(1, WEIGHTS))
        return [rollout.cursor_after["next_group_id"] for rollout in rollouts]

    assert asyncio.run(two()) == [4, 8]


def test_some_samples_are_shown_in_words() -> None:
    shown = Shown()
    made = pipeline(StandInEngines(["a"]), shown)
    made.show(3, asyncio.run(made.generate(3, WEIGHTS)).samples, kind="train")
    assert [record["group_id"] for record in shown.records] == [0, 1, 2, 3]
    first = shown.records[0]
    assert (first["step"], first["kind"], first["response"], first["versions"]) == (3, "train", "7", ["0.3"])
    assert first["prompt"].endswith("=")
    json.dumps(shown.records)


EVAL = {"interval": 1, "data": {"generator": "largest_digit"}, "max_prompts": 5, "sampling": {"temperature": 0.0}}


def evaluate(engines: StandInEngines, shown: Shown | None = None, **sections: Any) -> dict[str, Any]:
    made = pipeline(engines, shown, **{"eval": EVAL, **sections})
    return asyncio.run(made.evaluate(7, WEIGHTS))


def test_an_evaluation_has_its_own_sampling_and_prompts_and_says_what_it_measured() -> None:
    engines, shown = StandInEngines(["a", "b"]), Shown()
    metrics = evaluate(engines, shown)
    assert {sampling for _, _, sampling, _ in engines.asked} == {SamplingConfig(temperature=0.0)}
    assert metrics["eval/rollout/samples"] == 5
    assert (metrics["eval/incarnation"], metrics["eval/version"], metrics["eval/failed"]) == (0, 3, 0)
    assert 0.5 <= metrics["eval/reward/mean"] <= 1
    assert {record["kind"] for record in shown.records} == {"eval"}
    json.dumps(metrics, allow_nan=False)


def test_evaluation_prompts_are_held_out_the_same_each_time_and_leave_the_cursor_alone() -> None:
    shown = Shown()
    made = pipeline(StandInEngines(["a"]), shown, eval=EVAL)
    before = made.source.state()
    for step in range(2):
        asyncio.run(made.evaluate(step, WEIGHTS))
    assert made.source.state() == before
    prompts = [[record["prompt"] for record in shown.records if record["step"] == step] for step in range(2)]
    assert prompts[0] == prompts[1]
    assert prompts[0] != [prompt.text for prompt in made.source.next(5)]


def test_equal_prompts_of_an_evaluation_stay_separate_items(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "7 =", "label": "7"}\n{"prompt": "7 =", "label": "1"}\n')
    metrics = evaluate(StandInEngines(["a"]), eval={**EVAL, "data": {"path": str(tmp_path / "eval.jsonl")}})
    assert metrics["eval/rollout/samples"] == 2
    assert metrics["eval/reward/mean"] == 0.75


def test_a_failing_evaluation_is_counted_and_told_and_raises_nothing() -> None:
    metrics = evaluate(StandInEngines([]))
    assert metrics["eval/failed"] == 1
    assert "NoEngineServes" in metrics["eval/error"]
    assert "eval/reward/mean" not in metrics


def test_wrong_weights_are_never_passed_over_in_an_evaluation() -> None:
    def answer(_: str, request: GenerateRequest) -> GenerateResult:
        raise InvariantViolation("not the actor's")

    with pytest.raises(InvariantViolation):
        evaluate(StandInEngines(["a"], answer))


def test_evaluation_data_that_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        evaluate(StandInEngines(["a"]), eval={**EVAL, "data": {"path": str(tmp_path / "absent.jsonl")}})
