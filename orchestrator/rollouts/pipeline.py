"""One rollout: prompts -> responses of the serving engines -> rewards -> samples. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config import Config, RewardConfig
from orchestrator.data.context import limited, vocab_size
from orchestrator.data.source import DataSource
from orchestrator.data.tokenizer import decode_response
from orchestrator.filters.registry import resolve_filter
from orchestrator.rewards.registry import resolve_reward
from orchestrator.rewards.scoring import CONCURRENCY
from orchestrator.rollouts.buffer import Rollout
from orchestrator.rollouts.engine_lanes import CallLimits, Engines, Lanes
from orchestrator.rollouts.generation import resolve_generate
from orchestrator.rollouts.group_work import Asks, Group, GroupWork, Task
from orchestrator.rollouts.refill import Refill
from orchestrator.rollouts.requests import derive_seed
from orchestrator.rollouts.stats import group_stats
from orchestrator.tracking.base import Tracker
from state.errors import InvariantViolation, SlotwiseError
from state.slots import WeightId
from workers.batch import Prompt, Sample
from workers.config import SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGUN_AT_ONCE = 32
"""Groups that are begun in one turn of the event loop, so that the first requests are sent before the last are made."""
SHOWN_SAMPLES = 8
"""Samples of each rollout that are written out for people."""

logger = logging.getLogger(__name__)


class RolloutTimeout(SlotwiseError):
    """Responses did not come within `rollout.timeout_s`."""


class GenerateFailed(SlotwiseError):
    """The generate function failed for every sample of a rollout; the message has the first error."""


class NothingJudged(SlotwiseError):
    """No sample of a rollout has a reward, so there is nothing to learn from it; the message has the first error."""


class FilterFailed(SlotwiseError):
    """The filter raised: there is no telling which groups to train on."""


class RolloutPipeline:
    """Makes rollouts and evaluations of one run."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, engines: Engines, shown: Tracker) -> None:
        """`shown` takes some decoded samples of each rollout."""
        self._config, self._tokenizer, self._engines, self._shown = config, tokenizer, engines, shown
        prompts = limited(config.model, config.data, config.rollout)
        self.source = DataSource(prompts, tokenizer, config.run.seed)
        rollout, evaluation = config.rollout, config.eval
        self._training = self._task("train", rollout.n_samples_per_prompt, rollout, config.reward)
        self._evaluating = self._task(
            "eval", evaluation.n_samples_per_prompt, evaluation.sampling, evaluation.reward or config.reward
        )
        self._filter = None if rollout.filter is None else resolve_filter(rollout.filter)
        self._eval_prompts = self._make_eval_prompts()
        self._judges = asyncio.Semaphore(CONCURRENCY)
        self._turn = asyncio.Lock()

    async def generate(self, rollout_id: int, weights: WeightId) -> Rollout:
        """The next prompts of the data source, answered and judged. When that fails they are next again.

        Groups that the filter refuses or that time out are made up for by further prompts, within a limit. One rollout
        is made after the other, so that each has the prompts that follow those of the one before.
        """
        async with self._turn:
            before = self.source.state()
            refill = Refill(self._config.rollout.rollout_batch_size, self._config.rollout.max_prompts_factor)
            try:
                groups, perf = await self._do(self._training, weights, lambda done: self._more(refill, done))
                batch = refill.batch(groups)
                self._require_judged(batch)
            except BaseException:
                self.source.restore(before)
                raise
            cursor = {"data/epoch": self.source.cursor.epoch, "data/left_out": self.source.cursor.left_out}
            stats = group_stats(batch) | refill.stats(batch) | perf | cursor
            samples = tuple(sample for group in batch for sample in group.samples)
            return Rollout(rollout_id, samples, self.source.state(), stats)

    async def evaluate(self, step: int, weights: WeightId) -> dict[str, Any]:
        """Metrics `eval/*` of `weights` on prompts of their own. A failure is counted and told, never raised."""
        started = time.monotonic()
        metrics: dict[str, Any] = {"eval/incarnation": weights.incarnation, "eval/version": weights.version}
        try:
            prompts = iter([self._eval_prompts])
            groups, perf = await self._do(self._evaluating, weights, lambda _: next(prompts, []))
            stats = group_stats(groups) | perf
            self.show(step, [sample for group in groups for sample in group.samples], kind="eval")
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
                "spans": [[str(span.weights), span.start, span.end] for span in sample.spans],
            }
            self._shown.log(step, record)

    def _make_eval_prompts(self) -> list[Prompt]:
        evaluation = self._config.eval
        if evaluation.interval is None or evaluation.data is None:
            return []
        data = limited(self._config.model, evaluation.data, evaluation.sampling)
        held_out = DataSource(data, self._tokenizer, derive_seed(self._config.run.seed, "eval"))
        return held_out.first(evaluation.max_prompts)

    def _more(self, refill: Refill, done: Sequence[Group]) -> list[Prompt]:
        for group in done:
            refill.count(group, kept=group.timed_out or self.keeps(group))
        return self.source.next(n) if (n := refill.wanted()) else []

    def _require_judged(self, batch: Sequence[Group]) -> None:
        """A sample without a reward costs that sample; when no sample has one, every step would do nothing."""
        judged = [one for group in batch for one in group.judged]
        if self._training.reward is None or any(one.reward is not None for one in judged):
            return
        errors = [one.error for one in judged if one.error is not None]
        late = sum(one.timed_out for one in judged)
        cut = sum(sample.finish_reason == "abort" for group in batch for sample in group.samples)
        silent = len(judged) - len(errors) - late - cut
        counts = {"errors": len(errors), "timeouts": late, "aborted responses": cut, "answers that were None": silent}
        told = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        first = f"; the first error:\n{errors[0]}" if errors else ""
        raise NothingJudged(
            f"reward.name {self._config.reward.name} has judged none of {len(judged)} samples ({told}): there is "
            f"nothing to train on. Mend the reward, or raise reward.timeout_s{first}"
        )

    def keeps(self, group: Group) -> bool:
        """What the filter says. Raises `FilterFailed`."""
        try:
            return self._filter is None or self._filter(group.prompt, group.samples)
        except BaseException as error:  # an exit would end the event loop, and nobody would be told
            raised = traceback.format_exc().strip().splitlines()[-1]
            raise FilterFailed(
                f"rollout.filter {self._config.rollout.filter} raised on group {group.prompt.group_id}: {raised}"
            ) from error

    async def _do(
        self, task: Task, weights: WeightId, more: Callable[[Sequence[Group]], Sequence[Prompt]]
    ) -> tuple[list[Group], dict[str, float]]:
        """Groups in the order of their prompts. `more` is told what has just been done, and says what else to do."""
        started = time.monotonic()
        lanes = Lanes(self._engines, weights, CallLimits.of(self._config.rollout))
        work = self._work(task, lanes)
        asked: list[Prompt] = []
        tasks: dict[asyncio.Task[Group], int] = {}
        ended: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()

        async def begin(prompts: Sequence[Prompt]) -> None:
            with lanes.filling():
                for start in range(0, len(prompts), BEGUN_AT_ONCE):
                    for prompt in prompts[start : start + BEGUN_AT_ONCE]:
                        asked.append(prompt)
                        task = asyncio.ensure_future(work.group(len(tasks), prompt))
                        task.add_done_callback(ended.put_nowait)
                        tasks[task] = len(tasks)
                    await asyncio.sleep(0)

        counted = 0
        try:
            async with asyncio.timeout(self._config.rollout.timeout_s):
                await begin(more([]))
                while counted < len(tasks):
                    done = [await ended.get()]
                    while not ended.empty():
                        done.append(ended.get_nowait())
                    counted += len(done)
                    await begin(more([one.result() for one in sorted(done, key=lambda one: tasks[one])]))
        except TimeoutError as error:
            late = [prompt for prompt, one in zip(asked, tasks, strict=True) if not one.done()]
            raise RolloutTimeout(self._late(late)) from error
        finally:
            for one in tasks:
                one.cancel()
            lanes.close()
        groups = [one.result() for one in tasks]
        self._refuse_failed(task, groups)
        if groups and all(group.timed_out for group in groups):
            raise RolloutTimeout(
                f"none of {len(groups)} groups came within rollout.group_timeout_s = {task.timeout_s:g} s"
            )
        generated = max((group.generated_at for group in groups), default=started)
        return groups, {
            "perf/generate_s": generated - started,
            "perf/reward_s": time.monotonic() - generated,
        }

    def work(self, asks: Asks) -> GroupWork:
        """Makes groups to train on, one by one, for whoever counts them."""
        return self._work(self._training, asks)

    def refuse_useless(self, groups: Sequence[Group]) -> None:
        """Raise `GenerateFailed` or `NothingJudged` for a batch that holds nothing to train on."""
        self._refuse_failed(self._training, groups)
        self._require_judged(groups)

    def _work(self, task: Task, asks: Asks) -> GroupWork:
        return GroupWork(task, asks, self._tokenizer, self._config.run.seed, self._judges)

    def _refuse_failed(self, task: Task, groups: Sequence[Group]) -> None:
        errors = [error for group in groups for error in group.failed]
        if errors and len(errors) == len(groups) * task.n_samples_per_prompt:
            raise GenerateFailed(f"rollout.generate failed for all {len(errors)} samples; the first:\n{errors[0]}")
        verdicts = [one.error for group in groups for one in group.judged]
        if wrong := [error for error in verdicts if error is not None]:
            logger.warning(
                "the reward failed for %d of %d samples; the first:\n%s", len(wrong), len(verdicts), wrong[0]
            )

    def _late(self, prompts: Sequence[Prompt]) -> str:
        late = [str(prompt.group_id) for prompt in prompts]
        return (
            f"not all responses came within rollout.timeout_s = {self._config.rollout.timeout_s:g} s; "
            f"asked for {len(late)} groups: {', '.join(late[:8])}{', ...' if len(late) > 8 else ''}"
        )

    def _task(self, purpose: str, n: int, sampling: SamplingConfig, reward: RewardConfig) -> Task:
        rollout = self._config.rollout
        return Task(
            purpose=purpose,
            n_samples_per_prompt=n,
            sampling=sampling,
            generate=resolve_generate(rollout.generate),
            generate_name=f"rollout.generate {rollout.generate}",
            vocab_size=vocab_size(self._config.model),
            reward=None if reward.name is None else resolve_reward(reward.name),
            reward_timeout_s=reward.timeout_s,
            timeout_s=rollout.group_timeout_s,
            retries=rollout.group_retries,
            mask_former_versions=rollout.mask_former_versions,
        )
