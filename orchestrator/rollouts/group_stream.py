"""Groups that are generated continuously, beside training, with bounded staleness: what feeds a `fully_async` loop.

    data -> as many prompts as may be begun -> Continuing: engines, through publishes -> reward -> finished groups
                                                                                                      |
    rollout t  <-  `rollout_batch_size` finished groups, the oldest first, none staler than the bound <-+

A prompt that was begun is trained on once, or begun again: it is not forgotten because its samples came too late.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from orchestrator.batching import num_rollouts
from orchestrator.config import Config
from orchestrator.rollouts import staleness
from orchestrator.rollouts.buffer import Rollout
from orchestrator.rollouts.continuing import Continuing, TooStale
from orchestrator.rollouts.engine_lanes import CallLimits, Engines, NoEngineServes
from orchestrator.rollouts.group_work import Group
from orchestrator.rollouts.pipeline import RolloutPipeline, RolloutTimeout
from orchestrator.rollouts.stats import group_stats, staleness_stats
from orchestrator.rollouts.stream_state import Begun, Finished, StreamState
from state.slots import WeightId


class GroupStream:
    """See `supply.Supply`. All of it runs on one event loop."""

    def __init__(
        self,
        config: Config,
        pipeline: RolloutPipeline,
        engines: Engines,
        start_rollout_id: int,
        data_state: Mapping[str, Any] | None,
    ) -> None:
        """`data_state`: what `state()` returned before, to continue from."""
        self._config, self._pipeline, self._source = config, pipeline, pipeline.source
        self._batch, self._bound = config.rollout.rollout_batch_size, staleness.bound(config.loop)
        self._asks = Continuing(
            engines,
            CallLimits.of(config.rollout),
            continues=config.algorithm.old_logprobs == "engine" and not config.rollout.stop,
            too_old=lambda version: staleness.is_too_stale(version, self._next, self._bound),
            stranded=self._strand,
        )
        self._work = pipeline.work(self._asks)
        restored = StreamState.of(data_state)
        if restored.cursor is not None:
            self._source.restore(restored.cursor)
        self._trained = start_rollout_id
        self._taken: dict[int, list[Finished]] = {}
        self._finished = list(restored.finished)
        self._again = deque(restored.unfinished)
        self._running: dict[asyncio.Task[Group], Begun] = {}
        self._served: WeightId | None = None
        self._broken: Exception | None = None
        self._changed = asyncio.Event()
        self._begun = 0
        self._counts: Counter[str] = Counter()

    async def rollout(self, rollout_id: int, weights: WeightId) -> Rollout:
        """The next `rollout_batch_size` groups, once they are finished: by `weights` or by earlier ones."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(self._config.rollout.timeout_s):
                while (batch := self._take(rollout_id)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise RolloutTimeout(self._missing(rollout_id)) from error
        groups = [one.group for one in batch]
        self._pipeline.refuse_useless(groups)
        samples = tuple(sample for group in groups for sample in group.samples)
        stats = group_stats(groups) | staleness_stats(samples, rollout_id) | self._stats(len(groups))
        stats["perf/wait_s"] = time.monotonic() - asked
        return Rollout(rollout_id, samples, self._source.state(), stats)

    def mark_trained(self, rollout_id: int) -> None:
        if rollout_id not in self._taken:
            waiting = ", ".join(map(str, self._taken)) or "none"
            raise ValueError(f"rollout {rollout_id} is not waiting to be trained; waiting: {waiting}")
        del self._taken[rollout_id]
        self._trained = rollout_id + 1

    def state(self) -> dict[str, Any]:
        """JSON: how far the data was read, what is finished and not trained on, and what was begun and is not
        finished."""
        taken = [one for batch in self._taken.values() for one in batch]
        unfinished = [*self._running.values(), *self._again]
        return StreamState(self._source.state(), (*taken, *self._finished), tuple(unfinished)).to_json()

    def hold(self) -> None:
        self._asks.hold()

    def serve(self, weights: WeightId) -> None:
        self._served = weights
        if isinstance(self._broken, NoEngineServes):
            self._broken = None
        self._asks.serve(weights)
        self._forget_stale(self._next)
        self._begin()

    def stop(self) -> None:
        self._served = None
        for task in self._running:
            task.cancel()
        self._asks.close()

    @property
    def _next(self) -> int:
        """The rollout that the next batch is for."""
        return self._trained + len(self._taken)

    def _take(self, rollout_id: int) -> list[Finished] | None:
        """A batch, when there is one. Raises what keeps one from being there."""
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        self._forget_stale(rollout_id)
        self._begin()
        if len(self._finished) < self._batch:
            return None
        self._finished.sort(key=Finished.age)
        batch, self._finished = self._finished[: self._batch], self._finished[self._batch :]
        self._taken[rollout_id] = batch
        return batch

    def _forget_stale(self, rollout_id: int) -> None:
        """What waited too long to be trained on is begun again."""
        for one in [f for f in self._finished if staleness.is_too_stale(f.oldest, rollout_id, self._bound)]:
            self._finished.remove(one)
            self._drop(one.begun)

    def _drop(self, begun: Begun | None) -> None:
        self._counts["rollout/stale_dropped"] += 1
        if begun is not None:
            self._again.append(begun)

    def _begin(self) -> None:
        """As many groups as may be begun now."""
        if self._served is None:
            return
        last = min(self._served.version, num_rollouts(self._config) - 1 - self._bound)
        waiting = len(self._finished) + sum(map(len, self._taken.values()))
        accepted = staleness.accepted(self._trained, self._batch, waiting, len(self._running))
        for _ in range(staleness.capacity(self._bound, last, self._batch, accepted)):
            if self._again:
                begun = self._again.popleft()
                prompt = self._source.again(begun.at)
            else:
                begun = Begun(self._source.state())
                (prompt,) = self._source.next(1)
                self._counts["rollout/prompts"] += 1
            task = asyncio.get_running_loop().create_task(self._work.group(self._begun, prompt))
            self._begun += 1
            self._running[task] = begun
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Group]) -> None:
        begun = self._running.pop(task)
        if task.cancelled():
            return
        try:
            self._finish(begun, task)
            self._begin()
        except Exception as error:
            self._broken = error
        self._changed.set()

    def _finish(self, begun: Begun, task: asyncio.Task[Group]) -> None:
        """Raises what the run cannot go on after."""
        try:
            group = task.result()
        except TooStale:
            self._drop(begun)
            return
        limit = int((self._config.rollout.max_prompts_factor - 1) * self._batch)
        if group.timed_out:
            self._counts["rollout/groups_timed_out"] += 1
        elif self._pipeline.keeps(group):
            self._finished.append(Finished(begun, group))
        elif self._counts["filter/refused"] < limit:
            self._counts["filter/refused"] += 1
        else:
            self._counts["filter/refused_but_used"] += 1
            self._finished.append(Finished(begun, group))

    def _strand(self, error: NoEngineServes) -> None:
        """Whoever waits for a rollout publishes to the engines that take the place of those that were lost."""
        self._broken = self._broken or error
        self._changed.set()

    def _stats(self, groups: int) -> dict[str, Any]:
        """Since the rollout before."""
        names = ("prompts", "groups_timed_out", "stale_dropped")
        stats: dict[str, Any] = {f"rollout/{name}": self._counts[f"rollout/{name}"] for name in names}
        stats |= {name: self._counts[name] for name in ("filter/refused", "filter/refused_but_used")}
        stats |= {
            "rollout/groups": groups,
            "rollout/groups_waiting": len(self._finished),
            "rollout/groups_under_way": len(self._running),
            "data/epoch": self._source.cursor.epoch,
            "data/left_out": self._source.cursor.left_out,
        }
        self._counts.clear()
        return stats

    def _missing(self, rollout_id: int) -> str:
        """What a rollout waits for that did not come in time."""
        groups = sorted(begun.group_id for begun in self._running.values())
        shown = ", ".join(map(str, groups[:8])) + (", ..." if len(groups) > 8 else "")
        engines = "wait for a publish to end" if self._asks.waits else f"serve weights {self._served}"
        late = self._counts["rollout/groups_timed_out"]
        return (
            f"rollout {rollout_id} did not come within rollout.timeout_s = {self._config.rollout.timeout_s:g} s: "
            f"{len(self._finished)} of {self._batch} groups are finished, {late} timed out, {len(groups)} under way "
            f"({shown or 'none'}); engines {engines}"
        )
