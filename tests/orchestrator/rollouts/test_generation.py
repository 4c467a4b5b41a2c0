"""Generate functions: what they may return, and helpers for turns and tools that never tokenise twice."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from orchestrator.checks.configuration import problems
from orchestrator.config import Config
from orchestrator.rollouts.chat_deltas import UnusableTemplate, after_answer
from orchestrator.rollouts.generation import (
    Ask,
    Transcript,
    WrongTrajectory,
    check_trajectory,
    one_response,
    version_spans,
)
from orchestrator.rollouts.pipeline import RolloutPipeline
from state.slots import WeightId
from tests.orchestrator.rollouts.test_pipeline import WEIGHTS, Shown, StandInEngines
from workers.batch import Prompt, Trajectory
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLES / "multi_turn")
PROMPT = Prompt(0, (5, 6), "")


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def completion(*tokens: int, reason: Any = "stop") -> GenerateResult:
    return GenerateResult("0/0", tokens, tuple(-float(t) for t in tokens), reason, (WEIGHTS,))


class Answers:
    """Gives these completions in turn, and notes what was asked."""

    def __init__(self, *results: GenerateResult) -> None:
        self._results = list(results)
        self.asked: list[tuple[GenerateRequest, SamplingConfig]] = []

    async def __call__(self, request: GenerateRequest, sampling: SamplingConfig) -> GenerateResult:
        self.asked.append((request, sampling))
        return self._results.pop(0)


def ask(*results: GenerateResult, seed: int = 7) -> tuple[Ask, Answers]:
    answers = Answers(*results)
    return Ask(GenerateRequest("0/0", PROMPT.ids, seed), SamplingConfig(), answers), answers


def test_each_turn_of_a_sample_has_a_seed_and_a_name_of_its_own_and_the_first_has_the_samples() -> None:
    async def turns(seed: int) -> list[GenerateRequest]:
        asking, answers = ask(completion(3), completion(4), completion(5), seed=seed)
        for _ in range(3):
            await asking(PROMPT.ids)
        return [request for request, _ in answers.asked]

    first, again, other = (asyncio.run(turns(seed)) for seed in (7, 7, 8))
    assert first == again
    assert [request.request_id for request in first] == ["0/0", "0/0/1", "0/0/2"]
    assert first[0].seed == 7
    assert len({request.seed for request in [*first, *other]}) == 6


def test_a_turn_may_be_shorter_than_the_run_samples() -> None:
    asking, answers = ask(completion(3))
    asyncio.run(asking(PROMPT.ids, 5))
    assert answers.asked[0][1].max_response_len == 5


def test_without_a_function_a_sample_is_one_response() -> None:
    asking, _ = ask(completion(3, 1))
    made = asyncio.run(one_response(PROMPT, asking, SamplingConfig(), TOKENIZER))
    assert made == Trajectory((3, 1), (-3.0, -1.0), (1, 1), "stop")
    assert asking.versions == (WEIGHTS,)


def test_a_transcript_masks_what_others_say_and_keeps_what_engines_wrote() -> None:
    transcript = Transcript(PROMPT, 10)
    transcript.written(completion(3, 1))
    transcript.said((8, 9))
    assert transcript.ids == (5, 6, 3, 1, 8, 9)
    assert transcript.room == 6
    transcript.written(completion(4, 1))
    made = transcript.trajectory()
    assert made == Trajectory((3, 1, 8, 9, 4, 1), (-3.0, -1.0, 0.0, 0.0, -4.0, -1.0), (1, 1, 0, 0, 1, 1), "stop")


def test_what_others_say_is_cut_where_the_room_ends() -> None:
    transcript = Transcript(PROMPT, 3)
    transcript.written(completion(3, 1))
    transcript.said((8, 9))
    assert transcript.room == 0
    assert transcript.trajectory() == Trajectory((3, 1, 8), (-3.0, -1.0, 0.0), (1, 1, 0), "length")


GOOD = Trajectory((3, 1, 8, 4, 1), (-3.0, -1.0, 0.0, -4.0, -1.0), (1, 1, 0, 1, 1), "stop")
RESULTS = (completion(3, 1), completion(4, 1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(GOOD, response_ids=(3, 1, 8, 2, 1)), "token 2 of those to be trained on"),
        (replace(GOOD, logprobs=(-3.0, -1.0, 0.0, -4.5, -1.0)), "token 2 of those to be trained on"),
        (replace(GOOD, loss_mask=(1, 1, 1, 1, 1)), "token 2 of those to be trained on"),
        (replace(GOOD, loss_mask=(1, 0, 0, 1, 1)), "token 0 of those to be trained on"),
        (replace(GOOD, loss_mask=(1, 1, 0, 2, 1)), "only 0 and 1"),
        (replace(GOOD, response_ids=(3, 1, 100, 4, 1)), "token 2 has id 100, but the model's vocab_size is 100"),
        (replace(GOOD, response_ids=(3, 1, -1, 4, 1)), "token 2 has id -1"),
        (replace(GOOD, logprobs=(-3.0,)), "5 tokens, 1 log-probs, 5 mask entries"),
        (replace(GOOD, response_ids=(8,) * 9, logprobs=(0.0,) * 9, loss_mask=(0,) * 9), "max_response_len is 8"),
    ],
)
def test_tokens_that_no_engine_wrote_as_such_are_refused(wrong: Trajectory, says: str) -> None:
    check_trajectory(GOOD, RESULTS, 8, 100, "0/0")
    with pytest.raises(WrongTrajectory, match=f"sample 0/0.*{says}"):
        check_trajectory(wrong, RESULTS, 8, 100, "0/0")


def test_whole_completions_may_be_left_out() -> None:
    check_trajectory(Trajectory((4, 1), (-4.0, -1.0), (1, 1), "stop"), RESULTS, 8, 100, "0/0")
    check_trajectory(Trajectory((), (), (), "stop"), RESULTS, 8, 100, "0/0")


# --- token deltas


def test_only_what_follows_an_answer_is_tokenised_and_its_end_is_not_doubled() -> None:
    tool = [{"role": "tool", "content": "7"}]
    assert after_answer(TOKENIZER, ids("calc 3 + 4 <end>"), tool) == ids("<tool> 7 <end> <model>")
    assert after_answer(TOKENIZER, ids("calc 3 + 4"), tool) == ids("<end> <tool> 7 <end> <model>")


def test_a_template_that_rewrites_earlier_reasoning_changes_nothing_of_what_was_written() -> None:
    written = "<think> 3 4 </think> calc 3 + 4"
    conversation = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": written}]
    tool = {"role": "tool", "content": "7"}
    rendered = TOKENIZER.apply_chat_template([*conversation, tool], tokenize=False, add_generation_prompt=True)
    assert "<think>" not in rendered, "this template drops it, so that rendering anew would train on other tokens"

    transcript = Transcript(Prompt(0, ids("<user> 3 + 4 <end> <model>"), ""), 32)
    transcript.written(completion(*ids(f"{written} <end>")))
    transcript.said(after_answer(TOKENIZER, transcript.ids, [tool]))
    assert transcript.ids == ids(f"<user> 3 + 4 <end> <model> {written} <end> <tool> 7 <end> <model>")


def test_a_template_that_hides_answers_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "multi_turn")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}> {% endfor %}"
    with pytest.raises(UnusableTemplate, match="does not render an answer exactly once"):
        after_answer(tokenizer, (3,), [])


# --- the example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.syspath_prepend(str(EXAMPLES / "multi_turn"))
    content = yaml.safe_load((EXAMPLES / "multi_turn.yaml").read_text())
    assert content["model"]["tokenizer"] == "examples/multi_turn"
    content["model"]["tokenizer"] = str(EXAMPLES / "multi_turn")
    yield Config.model_validate(content)
    sys.modules.pop("calculator", None)


def test_the_example_has_no_problems_and_its_model_fits_its_tokenizer(example: Config) -> None:
    assert problems(example) == ()
    model: dict[str, Any] = example.model.config or {}
    assert model["vocab_size"] == len(TOKENIZER)
    assert (model["eos_token_id"], model["pad_token_id"]) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


class Scripted(StandInEngines):
    """Sample 0 of a group calls the calculator and repeats what it says, sample 1 calls it wrongly, the rest guess."""

    async def generate(self, engine_id: str, requests: Sequence[GenerateRequest], *rest: Any) -> list[GenerateResult]:
        await super().generate(engine_id, requests, *rest)
        return [self._play(request) for request in requests]

    def _play(self, request: GenerateRequest) -> GenerateResult:
        words = TOKENIZER.decode(list(request.prompt_ids)).split()
        index = int(request.request_id.split("/")[1])
        if "<tool>" in words:
            told = words[len(words) - 1 - words[::-1].index("<tool>") + 1 : -2]
            answer = " ".join(told) + " <end>"
        elif index == 0:
            answer = f"<think> 1 </think> calc {' '.join(words[1:4])} <end>"
        else:
            answer = "calc 5 <end>" if index == 1 else "0 <end>"
        return replace(completion(*ids(answer)), request_id=request.request_id)


def test_the_examples_model_calls_the_tool_reads_it_and_answers(example: Config) -> None:
    made = asyncio.run(RolloutPipeline(example, TOKENIZER, Scripted(["a", "b"]), Shown()).generate(0, WEIGHTS))
    used, misused, guessed = made.samples[:3]
    said = TOKENIZER.decode(list(used.response_ids)).split()
    one, other = TOKENIZER.decode(list(used.prompt_ids)).split()[1:4:2]
    total = " ".join(str(int(one) + int(other))).split()
    assert said == ["<think>", "1", "</think>", "calc", one, "+", other, "<end>",
                    "<tool>", *total, "<end>", "<model>", *total, "<end>"]  # fmt: skip
    masked = [word for word, trained in zip(said, used.loss_mask, strict=True) if not trained]
    assert masked == ["<tool>", *total, "<end>", "<model>"]
    assert [logprob for logprob, trained in zip(used.logprobs, used.loss_mask, strict=True) if not trained] == [
        0.0
    ] * len(masked)
    assert (used.reward, misused.reward) == (1.0, 0.25)
    assert "?" in TOKENIZER.decode(list(misused.response_ids))
    assert set(guessed.loss_mask) == {1}


# --- who wrote what


def by(ids: str, *versions: int, handovers: tuple[int, ...] = ()) -> GenerateResult:
    tokens = tuple(map(int, ids))
    logprobs = tuple(-float(token) for token in tokens)
    return GenerateResult("0/0", tokens, logprobs, "stop", tuple(WeightId(1, v) for v in versions), handovers)


def test_spans_say_which_weights_wrote_which_tokens_and_leave_out_what_others_said() -> None:
    first, unused, last = by("2345", 3, 4, handovers=(1,)), by("888", 4), by("67", 5)
    transcript = Transcript(Prompt(0, (1,), ""), 20)
    transcript.written(first)
    transcript.said((9, 9))
    transcript.written(last)
    spans = version_spans(transcript.trajectory(), [first, unused, last])
    assert [(span.weights.version, span.start, span.end) for span in spans] == [(3, 0, 1), (4, 1, 4), (5, 6, 8)]


def test_one_version_wrote_a_whole_response() -> None:
    (only,) = version_spans(Trajectory((2, 3), (-2.0, -3.0), (1, 1), "stop"), [by("23", 7)])
    assert (only.weights, only.start, only.end) == (WeightId(1, 7), 0, 2)
    assert version_spans(Trajectory((), (), (), "abort"), []) == ()
