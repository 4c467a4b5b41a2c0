"""A desk whose groups are generated continuously, over an engine that writes a token in each turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from orchestrator.config import Config
from orchestrator.rollouts.desk import RolloutDesk, RolloutRefs
from state.slots import WeightId
from tests.e2e.runs import merged
from workers.batch import Sample
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult

TOKENIZER_DIR = str(Path(__file__).parents[3] / "examples" / "quickstart")
AutoTokenizer.from_pretrained(TOKENIZER_DIR)  # imported and read before anything has a limit
BATCH, SAMPLES, LONGEST = 3, 2, 8


def configuration(changes: dict[str, Any] | None = None) -> Config:
    return Config.model_validate(
        merged(
            {
                "loop": {"mode": "fully_async", "num_rollout": 6},
                "model": {"tokenizer": TOKENIZER_DIR},
                "algorithm": {"old_logprobs": "engine"},
                "data": {"generator": "largest_digit"},
                "reward": {"name": "largest_digit"},
                "rollout": {
                    "rollout_batch_size": BATCH,
                    "n_samples_per_prompt": SAMPLES,
                    "max_response_len": LONGEST,
                    "engine": "sglang",  # asked in many calls at once
                    "requests_per_call": 1,
                    "timeout_s": 10.0,
                },
            },
            changes or {},
        )
    )


class Engine:
    """Writes its version (as a digit's token) once in each turn, as often as the request's seed says. Groups that are
    `held` get no further after their first token."""

    def __init__(self) -> None:
        self.weights: WeightId | None = None
        self.publishes = 0
        self.begun: list[int] = []
        self.held: set[int] = set()
        self.fails: Exception | None = None

    def stop_serving(self) -> None:
        """What is under way is cut off."""
        self.weights = None
        self.publishes += 1

    def serving(self, weights: WeightId) -> Sequence[str]:
        return ["engine"] if self.weights == weights else []

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        (request,) = requests
        if self.weights != expected:
            raise EngineRefused(f"serves {self.weights}")
        if self.fails is not None:
            raise self.fails
        group, began = int(request.request_id.split("/")[0]), self.publishes
        self.begun.append(group)
        tokens: list[int] = []
        reason: Any = "abort"
        while self.publishes == began:
            if not (tokens and group in self.held):
                tokens.append(2 + expected.version % 10)
                if len(tokens) == min(1 + request.seed % LONGEST, request.room(sampling)):
                    reason = "length"
                    break
            await asyncio.sleep(0)
        return [GenerateResult(request.request_id, tuple(tokens), (-0.5,) * len(tokens), reason, (expected,))]


class World:
    """What the driver does around a desk."""

    def __init__(
        self, directory: Path, config: Config, state: dict[str, Any] | None = None, start: int = 0, incarnation: int = 1
    ) -> None:
        self.engine = Engine()
        self.incarnation = incarnation
        self.trained: dict[int, list[Sample]] = {}
        self.stats: dict[int, Any] = {}
        samples = directory / f"samples-{incarnation}.jsonl"
        self.desk = RolloutDesk(config, self.engine, samples, start, state, put=lambda part: part)

    async def publish(self, version: int, in_between: Callable[[], None] | None = None, turns: int = 40) -> None:
        """Returns `turns` turns of the event loop after engines began to serve."""
        self.desk.hold()
        if in_between is not None:
            in_between()
            await settle()
        self.engine.stop_serving()
        await settle()
        self.engine.weights = WeightId(self.incarnation, version)
        self.desk.serve(self.engine.weights)
        await settle(turns)

    async def train(self, rollout_id: int) -> RolloutRefs:
        assert self.engine.weights is not None
        refs = await self.desk.generate(rollout_id, self.engine.weights)
        await asyncio.sleep(0)
        self.desk.mark_trained(rollout_id)
        self.trained[rollout_id] = [sample for shard in refs.shards for sample in shard.samples]
        self.stats[rollout_id] = refs.stats
        return refs

    async def loop(self, start: int, end: int, interval: int = 1) -> None:
        """With responses under way at every publish."""
        await self.publish(start, turns=5)
        for rollout_id in range(start, end):
            await self.train(rollout_id)
            if (rollout_id + 1) % interval == 0:
                await self.publish(rollout_id + 1, turns=5)

    def saved(self) -> dict[str, Any]:
        """Through a checkpoint's file."""
        state: dict[str, Any] = json.loads(json.dumps(self.desk.data_state(), allow_nan=False))
        return state

    def groups(self, rollout_id: int) -> list[int]:
        return sorted({sample.group_id for sample in self.trained[rollout_id]})


async def settle(turns: int = 40) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def go(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))
