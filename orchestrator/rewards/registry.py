"""Rewards by name. A reward judges one response; registered ones are listed here, others are named by import path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from orchestrator.options.imports import UnknownName, did_you_mean, import_function, is_import_path
from workers.batch import Prompt, Sample

RewardFunction = Callable[[Prompt, str, tuple[int, ...], Sample], float | Awaitable[float | None] | None]
"""`(prompt, response text, response ids, sample) -> reward`, or a coroutine function of the same arguments.

None says that this response cannot be judged: it is counted and left out of training.
"""


def largest_digit(prompt: Prompt, response: str, response_ids: tuple[int, ...], sample: Sample) -> float:
    """Share of right tokens among (largest digit, end): 0.5 for beginning with it, 0.5 for ending after one token."""
    words = response.split()
    right = bool(words) and words[0] == prompt.label
    ended = len(words) == 1 and sample.finish_reason == "stop"
    return 0.5 * right + 0.5 * ended


def exact_match(prompt: Prompt, response: str, response_ids: tuple[int, ...], sample: Sample) -> float:
    """1 for a response that is the label, spaces around it aside; else 0."""
    return float(response.strip() == str(prompt.label).strip())


REWARDS: Mapping[str, RewardFunction] = {"largest_digit": largest_digit, "exact_match": exact_match}


def resolve_reward(name: str) -> RewardFunction:
    """A registered reward, or the function at an import path."""
    if name in REWARDS:
        return REWARDS[name]
    if is_import_path(name):
        return import_function(name)
    raise UnknownName(
        f"unknown reward {name!r}{did_you_mean(name, REWARDS)} (or an import path package.module:function)"
    )
