"""Sums with a calculator: the model may write `calc 3 + 4`, reads what the tool says, and answers.

PYTHONPATH=examples/multi_turn slotwise train examples/multi_turn.yaml
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from orchestrator.data.generators import Row
from orchestrator.rollouts.chat_deltas import after_answer
from orchestrator.rollouts.generation import Ask, Transcript
from workers.batch import Prompt, Sample, Trajectory
from workers.config import SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TURNS = 3


def sums(seed: int, index: int) -> Row:
    """Two digits to be added; the label is their sum, digit by digit."""
    one, other = random.Random(f"sums/{seed}/{index}").choices(range(10), k=2)
    return Row(prompt=f"{one} + {other}", label=" ".join(str(one + other)))


def calculator(answer: str) -> str | None:
    """What the tool says to an answer: the sum, `?` for what is no sum, None when it was not called."""
    _, called, rest = answer.partition("calc")
    if not called:
        return None
    words = rest.replace("<end>", "").split()
    if len(words) != 3 or words[1] != "+" or not (words[0].isdigit() and words[2].isdigit()):
        return "?"
    return " ".join(str(int(words[0]) + int(words[2])))


async def play(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """Turns of the model and the calculator, until the model answers without it."""
    transcript = Transcript(prompt, sampling.max_response_len)
    for turn in range(MOST_TURNS):
        answer = await ask(transcript.ids, transcript.room)
        transcript.written(answer)
        said = calculator(str(tokenizer.decode(list(answer.response_ids))))
        if said is None or answer.finish_reason != "stop" or turn == MOST_TURNS - 1:
            break
        transcript.said(after_answer(tokenizer, answer.response_ids, [{"role": "tool", "content": said}]))
        if transcript.room == 0:
            break
    return transcript.trajectory()


def reward(prompt: Prompt, response: str, response_ids: tuple[int, ...], sample: Sample) -> float:
    """0.25 for a call of the calculator, 0.75 for ending with the sum."""
    last = response.rpartition("<model>")[2].replace("<end>", "")
    return 0.25 * ("calc" in response) + 0.75 * (last.split() == str(prompt.label).split())
