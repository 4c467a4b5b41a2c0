"""One rollout: prompts -> responses of the serving engines -> rewards -> samples. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.config import Config, RewardConfig
from orchestrator.context import limited
from orchestrator.data import DataSource
from orchestrator.requests import assign, check_answers, derive_seed, requests_for, to_sample
from orchestrator.rewards.registry import RewardFunction, resolve_reward
from orchestrator.rewards.scoring import Item, Judged, judge
from orchestrator.rollout_buffer import Rollout
from orchestrator.rollout_stats import rollout_stats
from orchestrator.tokenizer import decode_response
from orchestrator.tracking.base import Tracker
from state.errors import InvariantViolation, SlotwiseError
from state.slots import WeightId
from workers.batch import Prompt, Sample
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_SAMPLES = 8
"""Samples of each rollout that are written out for people."""

logger = logging.getLogger(__name__)


class EngineLost(SlotwiseError):
    """An engine died over its requests. They are answered by the engines that are left."""


class NoEngineServes(SlotwiseError):
    """No engine holds the weights that responses are wanted from."""


class RolloutTimeout(SlotwiseError):
    """Responses did not come within `rollout.timeout_s`."""


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
class Task:
    """What is done with each prompt. `purpose` sets the seeds of one use of a prompt apart from those of another."""

    purpose: str
    n_samples_per_prompt: int
    sampling: SamplingConfig
    reward: RewardFunction | None
    reward_timeout_s: float


class RolloutPipeline:
    """Makes rollouts and evaluations of one run."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, engines: Engines, shown: Tracker) -> None:
        """`shown` takes some decoded samples of each rollout."""
        self._config, self._tokenizer, self._engines, self._shown = config, tokenizer, engines, shown
        prompts = limited(config.model, config.data, config.rollout)
        self.source = DataSource(prompts, tokenizer, config.run.seed)
        self._training = _task("train", config.rollout.n_samples_per_prompt, config.rollout, config.reward)
        self._evaluating = _task(
            "eval", config.eval.n_samples_per_prompt, config.eval.sampling, config.eval.reward or config.reward
        )
        self._eval_prompts = self._make_eval_prompts()

    async def generate(self, rollout_id: int, weights: WeightId) -> Rollout:
        """The next prompts of the data source, answered and judged. When that fails they are next again."""
        before = self.source.state()
        prompts = self.source.next(self._config.rollout.rollout_batch_size)
        cursor, cursor_after = self.source.cursor, self.source.state()
        try:
            samples, stats = await self._do(self._training, prompts, weights)
        except BaseException:
            self.source.restore(before)
            raise
        stats |= {"data/epoch": cursor.epoch, "data/left_out": cursor.left_out}
        return Rollout(rollout_id, tuple(samples), cursor_after, stats)

    async def evaluate(self, step: int, weights: WeightId) -> dict[str, Any]:
        """Metrics `eval/*` of `weights` on prompts of their own. A failure is counted and told, never raised."""
        started = time.monotonic()
        metrics: dict[str, Any] = {"eval/incarnation": weights.incarnation, "eval/version": weights.version}
        try:
            samples, stats = await self._do(self._evaluating, self._eval_prompts, weights)
            self.show(step, samples, kind="eval")
            metrics |= {f"eval/{key}": value for key, value in stats.items() if not key.startswith("perf/")}
            metrics["eval/failed"] = 0
        except InvariantViolation:
            raise
        except Exception as error:
            logger.exception("evaluation at step %d failed", step)
            metrics |= {"eval/failed": 1, "eval/error": f"{type(error).__name__}: {error}"}
        metrics["perf/eval_s"] = time.monotonic() - started
        return metrics

    def show(self, step: int, samples: Sequence[Sample], kind: str) -> None:
        """Write the first sample of the first groups in words."""
        for sample in [sample for sample in samples if sample.index == 0][:SHOWN_SAMPLES]:
            record = {
                "kind": kind,
                "group_id": sample.group_id,
                "prompt": self._tokenizer.decode(list(sample.prompt_ids)),
                "response": decode_response(self._tokenizer, sample.response_ids),
                "reward": sample.reward,
                "finish_reason": sample.finish_reason,
                "versions": [str(version) for version in sample.versions],
            }
            self._shown.log(step, record)

    def _make_eval_prompts(self) -> list[Prompt]:
        evaluation = self._config.eval
        if evaluation.interval is None or evaluation.data is None:
            return []
        data = limited(self._config.model, evaluation.data, evaluation.sampling)
        held_out = DataSource(data, self._tokenizer, derive_seed(self._config.run.seed, "eval"))
        return held_out.first(evaluation.max_prompts)

    async def _do(
        self, task: Task, prompts: Sequence[Prompt], weights: WeightId
    ) -> tuple[list[Sample], dict[str, Any]]:
        """Samples in the order of the prompts, with their rewards; and statistics."""
        started = time.monotonic()
        seed_of = (self._config.run.seed, task.purpose)
        groups = [requests_for(prompt, task.n_samples_per_prompt, seed_of) for prompt in prompts]
        results = await self._respond(groups, task.sampling, weights)
        generated = time.monotonic()
        samples = [
            to_sample(prompt, index, request, results[request.request_id])
            for prompt, group in zip(prompts, groups, strict=True)
            for index, request in enumerate(group)
        ]
        judged = await self._judge(task, samples, {prompt.group_id: prompt for prompt in prompts})
        samples = [replace(sample, reward=one.reward) for sample, one in zip(samples, judged, strict=True)]
        perf = {"perf/generate_s": generated - started, "perf/reward_s": time.monotonic() - generated}
        return samples, rollout_stats(samples, judged) | perf

    async def _judge(self, task: Task, samples: Sequence[Sample], prompts: Mapping[int, Prompt]) -> list[Judged]:
        """Aborted samples are not judged: a part of a response has no reward."""
        judged = [Judged(None)] * len(samples)
        if task.reward is None:
            return judged
        whole = [i for i, sample in enumerate(samples) if sample.finish_reason != "abort"]
        items = [
            Item(prompts[samples[i].group_id], decode_response(self._tokenizer, samples[i].response_ids), samples[i])
            for i in whole
        ]
        for i, one in zip(whole, await judge(task.reward, items, task.reward_timeout_s), strict=True):
            judged[i] = one
        errors = [one.error for one in judged if one.error is not None]
        if errors:
            logger.warning("the reward failed for %d of %d samples; the first:\n%s", len(errors), len(items), errors[0])
        return judged

    async def _respond(
        self, groups: Sequence[Sequence[GenerateRequest]], sampling: SamplingConfig, weights: WeightId
    ) -> dict[str, GenerateResult]:
        """Results by request id. Every serving engine works at once; requests of one that dies go to the others."""
        results: dict[str, GenerateResult] = {}
        lost: set[str] = set()
        limit = self._config.rollout.timeout_s
        pending = list(groups)
        try:
            async with asyncio.timeout(limit):
                while pending:
                    serving = [engine for engine in self._engines.serving(weights) if engine not in lost]
                    if not serving:
                        raise NoEngineServes(
                            f"no engine serves weights {weights}; lost over this rollout: {sorted(lost)}"
                        )
                    shares = assign(pending, len(serving))
                    answers = await asyncio.gather(
                        *(self._ask(*one, sampling, weights) for one in zip(serving, shares, strict=True))
                    )
                    for engine, answer in zip(serving, answers, strict=True):
                        if answer is None:
                            lost.add(engine)
                        else:
                            results.update({result.request_id: result for result in answer})
                    pending = [group for group in pending if any(one.request_id not in results for one in group)]
        except TimeoutError as error:
            missing = [group[0].request_id.partition("/")[0] for group in pending]
            raise RolloutTimeout(
                f"not all responses came within rollout.timeout_s = {limit:g} s; "
                f"asked for {len(missing)} groups: {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}"
            ) from error
        return results

    async def _ask(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, weights: WeightId
    ) -> Sequence[GenerateResult] | None:
        """None when the engine died over them."""
        if not requests:
            return ()
        try:
            results = await self._engines.generate(engine_id, requests, sampling, weights)
        except EngineLost as error:
            logger.warning("engine %s was lost over %d requests: %s", engine_id, len(requests), error)
            return None
        check_answers(requests, results, engine_id)
        return results


def _task(purpose: str, n: int, sampling: SamplingConfig, reward: RewardConfig) -> Task:
    function = None if reward.name is None else resolve_reward(reward.name)
    return Task(purpose, n, sampling, function, reward.timeout_s)
