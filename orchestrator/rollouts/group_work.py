"""One group: the samples of one prompt, generated and judged. What goes wrong with a sample costs that sample; what
takes too long costs its group."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from orchestrator.data.tokenizer import decode_response
from orchestrator.rewards.registry import RewardFunction
from orchestrator.rewards.scoring import Item, Judged, judge
from orchestrator.rollouts.generation import Ask, Generate, check_trajectory, newest_only, version_spans
from orchestrator.rollouts.requests import requests_for, to_sample
from state.errors import SlotwiseError
from workers.batch import Prompt, Sample, Trajectory
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with each prompt. `purpose` sets the seeds of one use of a prompt apart from those of another.

    `generate_name` is what the user calls `generate`; `vocab_size` of the model is None where it is not known. A group
    that is not generated within `timeout_s`, or has responses that were cut off by an abort, is asked for again up to
    `retries` times.
    """

    purpose: str
    n_samples_per_prompt: int
    sampling: SamplingConfig
    generate: Generate
    generate_name: str
    vocab_size: int | None
    reward: RewardFunction | None
    reward_timeout_s: float
    timeout_s: float | None
    retries: int
    mask_former_versions: bool


@dataclass(frozen=True, slots=True)
class Group:
    """What became of one prompt. `failed` has the error of each sample that could not be generated; `timed_out`: the
    group is without samples; `generated_at` is the monotonic time at which its last response was there."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    judged: tuple[Judged, ...]
    failed: tuple[str, ...]
    asked_again: int
    timed_out: bool
    generated_at: float


@dataclass(frozen=True, slots=True)
class _Made:
    """One sample before it is judged."""

    sample: Sample
    error: str | None = None


class Asks(Protocol):
    """Whoever is asked for responses."""

    async def ask(self, number: int, request: GenerateRequest, sampling: SamplingConfig) -> GenerateResult:
        """The answer to a request of group `number`, which decides the engine."""
        ...


class GroupWork:
    """Works on groups, one by one."""

    def __init__(
        self,
        task: Task,
        asks: Asks,
        tokenizer: PreTrainedTokenizerBase,
        run_seed: int,
        judges: asyncio.Semaphore,
    ) -> None:
        """`judges` bounds how many samples are judged at once."""
        self._task, self._asks, self._tokenizer, self._judges = task, asks, tokenizer, judges
        self._seed_of = (run_seed, task.purpose)

    async def group(self, number: int, prompt: Prompt) -> Group:
        """Group `number`, which decides whom to ask."""
        requests = requests_for(prompt, self._task.n_samples_per_prompt, self._seed_of)
        made: dict[int, _Made] = {}
        attempt = 0
        while True:
            wanted = {i: request for i, request in enumerate(requests) if i not in made}
            made |= await self._attempt(number + attempt, prompt, wanted)
            missing = [request.request_id for i, request in enumerate(requests) if i not in made]
            cut = [i for i, one in made.items() if one.sample.finish_reason == "abort" and one.error is None]
            if not (missing or cut) or attempt == self._task.retries:
                break
            for i in cut:
                del made[i]
            attempt += 1
        if missing:
            logger.warning(
                "group %d is left out: no response to %s within %g s, asked %d times",
                *(prompt.group_id, ", ".join(missing), self._task.timeout_s, attempt + 1),
            )
            return Group(prompt, (), (), (), attempt, True, time.monotonic())
        generated_at = time.monotonic()
        samples = [made[i].sample for i in range(len(requests))]
        judged = await self._judge(prompt, samples)
        failed = tuple(one.error for one in made.values() if one.error is not None)
        samples = [replace(sample, reward=one.reward) for sample, one in zip(samples, judged, strict=True)]
        return Group(prompt, tuple(samples), tuple(judged), failed, attempt, False, generated_at)

    async def _attempt(self, number: int, prompt: Prompt, wanted: Mapping[int, GenerateRequest]) -> dict[int, _Made]:
        """What is there in time, by index."""
        tasks = {i: asyncio.ensure_future(self._sample(number, prompt, i, request)) for i, request in wanted.items()}
        try:
            done, _ = await asyncio.wait(
                tasks.values(), timeout=self._task.timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for task in tasks.values():
                task.cancel()
        return {i: task.result() for i, task in tasks.items() if task in done}

    async def _sample(self, number: int, prompt: Prompt, index: int, request: GenerateRequest) -> _Made:
        ask = Ask(request, self._task.sampling, lambda one, sampling: self._asks.ask(number, one, sampling))
        try:
            trajectory = await self._trajectory(prompt, ask)
        except (SlotwiseError, asyncio.CancelledError):
            raise
        except BaseException:  # an exit would end the event loop, and nobody would be told
            error = traceback.format_exc()
            return _Made(to_sample(prompt, index, request, Trajectory((), (), (), "abort"), ask.versions), error)
        spans = version_spans(trajectory, ask.results)
        if self._task.mask_former_versions:
            trajectory = newest_only(trajectory, spans)
        return _Made(to_sample(prompt, index, request, trajectory, ask.versions, spans))

    async def _trajectory(self, prompt: Prompt, ask: Ask) -> Trajectory:
        task = self._task
        made: object = await task.generate(prompt, ask, task.sampling, self._tokenizer)
        if not isinstance(made, Trajectory):
            raise TypeError(f"{task.generate_name} returned {made!r:.200}, which is no Trajectory")
        check_trajectory(made, ask.results, task.sampling.max_response_len, task.vocab_size, ask.request_id)
        return made

    async def _judge(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Judged]:
        """Aborted samples are not judged: a part of a response has no reward."""
        judged = [Judged(None)] * len(samples)
        if self._task.reward is None:
            return judged
        whole = [i for i, sample in enumerate(samples) if sample.finish_reason != "abort"]
        items = [Item(prompt, decode_response(self._tokenizer, samples[i].response_ids), samples[i]) for i in whole]
        verdicts = await judge(self._task.reward, items, self._task.reward_timeout_s, self._judges)
        for i, one in zip(whole, verdicts, strict=True):
            judged[i] = one
        return judged
