"""What the rollout manager costs: many requests through one manager to engines that take a fixed time. Prints one JSON.

    python benchmarks/manager_load.py
    python benchmarks/manager_load.py --batching

The engines are stand-ins, each an actor of its own, that wait `--delay` seconds for each call of `--at-once` requests
and then answer with responses of 32 tokens; with `--batching` for each request, of which they work on as many at once,
as a server does. What they can do at best is known, and all else is the manager's. This process does what the
manager's does: data, requests, queues, calls over Ray, answers, rewards, statistics. `overhead_ms_per_sample` is its
CPU time; `throughput` is the share of what the engines can do.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from benchmarks.reporting import report
from orchestrator.config import Config
from orchestrator.data.tokenizer import load_tokenizer
from orchestrator.engines import RayEngine
from orchestrator.rollouts.engine_lanes import CallLimits
from orchestrator.rollouts.pipeline import RolloutPipeline
from state.slots import WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

REPO = Path(__file__).parents[1]
TOKENS = 32
WEIGHTS = WeightId(1, 1)


@ray.remote(num_cpus=0)
class StandInEngine:
    """Takes the same time for every call, one call after the other."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        time.sleep(self._delay_s)
        ids, logprobs = (9,) * TOKENS, (-0.5,) * TOKENS
        return tuple(GenerateResult(one.request_id, ids, logprobs, "length", (expected,)) for one in requests)


@ray.remote(num_cpus=0)
class BatchingEngine:
    """Takes the same time for every request, and works on some at once."""

    def __init__(self, delay_s: float, at_once: int) -> None:
        self._delay_s, self._places = delay_s, asyncio.Semaphore(at_once)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        return tuple(await asyncio.gather(*(self._one(request, expected) for request in requests)))

    async def _one(self, request: GenerateRequest, expected: WeightId) -> GenerateResult:
        async with self._places:
            await asyncio.sleep(self._delay_s)
        return GenerateResult(request.request_id, (9,) * TOKENS, (-0.5,) * TOKENS, "length", (expected,))


class StandInFleet:
    """All engines serve."""

    def __init__(self, links: Sequence[RayEngine]) -> None:
        self._links = {link.engine_id: link for link in links}

    def serving(self, weights: WeightId) -> Sequence[str]:
        return tuple(self._links)

    async def generate(self, engine_id: str, *arguments: Any) -> Sequence[GenerateResult]:
        results: Sequence[GenerateResult] = await self._links[engine_id].call("generate", *arguments)
        return results


class Nowhere:
    """Takes the samples that are shown."""

    def log(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def measure(
    engines: int, groups: int, n: int, at_once: int, delay_s: float, repeats: int, batching: bool
) -> dict[str, Any]:
    config = Config.model_validate(
        {
            "model": {"tokenizer": str(REPO / "examples" / "quickstart")},
            "data": {"generator": "largest_digit"},
            "reward": {"name": "largest_digit"},
            "rollout": {
                "num_engines": engines,
                "rollout_batch_size": groups,
                "n_samples_per_prompt": n,
                "engine": "sglang" if batching else "embedded",
                "max_batch_size": at_once,
                "max_response_len": TOKENS,
            },
        }
    )
    limits = CallLimits.of(config.rollout)
    kinds: tuple[Any, Any] = StandInEngine, BatchingEngine
    start = (
        partial(kinds[1].options(max_concurrency=limits.calls).remote, at_once=at_once) if batching else kinds[0].remote
    )
    links = [RayEngine(f"stand-in/{i}", start(delay_s)) for i in range(engines)]
    pipeline = RolloutPipeline(config, load_tokenizer(config.model), StandInFleet(links), Nowhere())
    best_s = math.ceil(groups / engines * n / at_once) * delay_s
    runs = []

    async def all_runs() -> None:
        for number in range(repeats + 1):
            began, cpu = time.perf_counter(), time.process_time()
            rollout = await pipeline.generate(number, WEIGHTS)
            took, used = time.perf_counter() - began, time.process_time() - cpu
            assert len(rollout.samples) == groups * n
            runs.append((took, used))

    asyncio.run(all_runs())
    took, used = min(runs[1:])
    samples = groups * n
    return {
        "engines": engines,
        "samples": samples,
        "at_once": at_once,
        "requests_per_call": limits.requests,
        "delay_s": delay_s,
        "engines_best_s": best_s,
        "took_s": [round(t, 4) for t, _ in runs[1:]],
        "throughput": best_s / took,
        "samples_per_s": samples / took,
        "overhead_ms_per_sample": 1000 * used / samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--samples-per-group", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        measured = measure(
            given.engines,
            given.groups,
            given.samples_per_group,
            given.at_once,
            given.delay,
            given.repeats,
            given.batching,
        )
    finally:
        ray.shutdown()
    machine = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
    report({"benchmark": "manager_load"} | machine | measured, given.out)


if __name__ == "__main__":
    main()
