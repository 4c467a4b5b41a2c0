"""Rewards that kill engines of the run they judge, at given versions. They run in the rollout manager."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from orchestrator.rewards.registry import largest_digit
from tests.e2e.runs import lines
from workers.batch import Prompt, Sample

MINUTES_S = 240.0
_done: set[str] = set()
_lock = threading.Lock()


def training(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    """At version 1 engine 0 dies; at version 2 this waits until its replacement is up."""
    with _lock:
        version = sample.versions[0].version
        if version == 1:
            _once("first", 0)
        if version == 2:
            _wait_until_stale("engine/2")
    return largest_digit(prompt, response, ids, sample)


def evaluation(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    """At versions 3 and 4 all engines die."""
    with _lock:
        if sample.versions[0].version >= 3:
            _once(f"all at {sample.versions[0].version}", *range(8))
    return largest_digit(prompt, response, ids, sample)


def of_a_rank(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    """At version 1 a training rank dies, and this judges on for minutes."""
    with _lock:
        first = sample.versions[0].version == 1 and "rank" not in _done
        _done.add("rank" if first else "")
    if first:
        ray.kill(ray.get_actor(f"{_run()}/actor/1", namespace=_run()))
        time.sleep(MINUTES_S)
    return largest_digit(prompt, response, ids, sample)


def _once(what: str, *engines: int) -> None:
    if what not in _done:
        _done.add(what)
        for index in engines:
            try:
                actor = ray.get_actor(f"{_run()}/engine/{index}", namespace=_run())
                os.kill(ray.get(actor.view.remote(), timeout=30).pid, 9)
            except (ValueError, RayActorError):
                continue


def _run() -> str:
    return str(ray.get_runtime_context().namespace)


def _wait_until_stale(engine: str) -> None:
    fleet = Path(os.environ["DEADLY_RUN_DIR"]) / "journal" / "fleet.jsonl"
    deadline = time.monotonic() + 60
    while not any(e["engine"].endswith(engine) and e["trigger"] == "started" for e in lines(fleet)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{engine} did not come up")
        time.sleep(0.05)
