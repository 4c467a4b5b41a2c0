"""Asks whichever engines serve the newest weights; what a publish cuts off goes on with the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.rollouts.engine_lanes import CallLimits, Engines, Lanes, NoEngineServes
from orchestrator.rollouts.requests import derive_seed
from state.errors import SlotwiseError
from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult


class TooStale(SlotwiseError):
    """A response was begun by weights that are too old by now for it to be trained on."""


class Continuing:
    """See `group_work.Asks`. Between `hold` and `serve` everybody waits; whoever limits the whole limits that too.

    `continues`: the tokens that are there stay, and the next weights write the rest; otherwise a response that was cut
    off begins anew, so that every response is of one version. `too_old` judges the version that wrote the first token.
    `stranded` is told when no engine is left that serves: nothing goes on until the next publish.
    """

    def __init__(
        self,
        engines: Engines,
        limits: CallLimits,
        *,
        continues: bool,
        too_old: Callable[[int], bool],
        stranded: Callable[[NoEngineServes], None],
    ) -> None:
        self._engines, self._limits = engines, limits
        self._continues, self._too_old, self._stranded = continues, too_old, stranded
        self._lanes: Lanes | None = None
        self._served = asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether nobody is asked, because weights are under way or no engine serves."""
        return not self._served.is_set()

    def hold(self) -> None:
        """Engines are about to be paused."""
        self._served.clear()

    def serve(self, weights: WeightId) -> None:
        """Engines were proven to hold `weights`."""
        self._lanes = Lanes(self._engines, weights, self._limits)
        self._served.set()

    def close(self) -> None:
        """Wait for no answer any more."""
        self._served.clear()
        if self._lanes is not None:
            self._lanes.close()

    async def ask(self, number: int, request: GenerateRequest, sampling: SamplingConfig) -> GenerateResult:
        """The whole answer to a request of group `number`, by as many versions as it took."""
        parts: list[GenerateResult] = []
        while True:
            await self._served.wait()
            lanes = self._lanes
            assert lanes is not None
            try:
                answer = await lanes.ask(number, _rest(request, parts, sampling), sampling)
            except NoEngineServes as error:
                if not self._moved_on(lanes):
                    self._served.clear()
                    self._stranded(error)
                continue
            if self._continues and answer.response_ids:
                parts.append(answer)
            if answer.finish_reason != "abort" or not self._moved_on(lanes):
                return _whole(parts or [answer], answer)
            if _written(parts) >= request.room(sampling):
                return replace(_whole(parts, answer), finish_reason="length")
            await self._served.wait()
            if parts and self._too_old(parts[0].versions[0].version):
                raise TooStale(f"request {request.request_id} was begun by {parts[0].versions[0]}")

    def _moved_on(self, lanes: Lanes) -> bool:
        """Whether these weights are no longer served, or will not be in a moment."""
        return self.waits or lanes is not self._lanes


def _written(parts: Sequence[GenerateResult]) -> int:
    return sum(len(part.response_ids) for part in parts)


def _rest(request: GenerateRequest, parts: Sequence[GenerateResult], sampling: SamplingConfig) -> GenerateRequest:
    """What is left of a request. With a seed of its own, since engines count positions from where a response begins."""
    if not parts:
        return request
    written = _written(parts)
    return GenerateRequest(
        request.request_id,
        request.prompt_ids + tuple(token for part in parts for token in part.response_ids),
        derive_seed(request.seed, "after", written),
        request.room(sampling) - written,
    )


def _whole(parts: Sequence[GenerateResult], last: GenerateResult) -> GenerateResult:
    """One answer of all parts, that ended as the last did."""
    writers = [weights for part in parts for weights in part.writers]
    changes = [place for place in range(1, len(writers)) if writers[place] != writers[place - 1]]
    versions = tuple(writers[place] for place in (0, *changes)) if writers else parts[-1].versions
    return replace(
        last,
        response_ids=tuple(token for part in parts for token in part.response_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=versions,
        handovers=tuple(changes),
    )
