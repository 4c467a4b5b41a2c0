"""Shows what is live on every rank and engine, while they work: the page, in an actor of its own.

It asks each rank and the fleet for their views, which they answer on threads that never wait for the work, and reads
the rest from the journals. `inspector.json` in the run directory, readable by its owner alone, says where it listens
and holds its token; through Ray it is found as `RUN/inspector` in the namespace of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import ray

from orchestrator.inspector.access import Access, announce
from orchestrator.inspector.server import VIEW, Pages, serve

ANSWER_WITHIN_S = 1.0
NAME = "inspector"


@ray.remote(num_cpus=0, max_restarts=0)
class Inspector:
    """`manager`: the RolloutManager, which knows the engines; None: there are none."""

    def __init__(self, run: str, run_dir: str, manager: Any) -> None:
        self._run, self._run_dir, self._manager = run, Path(run_dir), manager
        self._workers: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        """Ray reads this once, after `__init__`: identity, never state."""
        return f"Inspector({self._run})"

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address of the page, which asks for the token."""
        access = Access()
        _, address = await serve(Pages(self._run_dir, access, self.view), host, port)
        announce(self._run_dir, {"url": address + VIEW, "token": access.token})
        return address

    async def follow(self, workers: Mapping[str, Any]) -> None:
        """The ranks of the gang from now on: handles by name."""
        self._workers = dict(workers)

    async def view(self) -> dict[str, Any]:
        """What every rank and engine answers now, or that it does not."""
        workers, engines = await asyncio.gather(self._worker_rows(), self._engine_rows())
        return {"run": self._run, "source": "live", "workers": workers, "engines": engines}

    async def _worker_rows(self) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(_answer(w.view.remote()) for w in self._workers.values()))
        return [
            _unreachable(self._run, name, error) if error else answer.to_json()
            for name, (answer, error) in zip(self._workers, answers, strict=True)
        ]

    async def _engine_rows(self) -> list[dict[str, Any]]:
        if self._manager is None:
            return []
        rows, error = await _answer(self._manager.engine_rows.remote())
        return [{"engine": "all", "state": "unreachable", "reason": error}] if error else rows


def _unreachable(run: str, name: str, error: str) -> dict[str, Any]:
    role, _, rank = name.partition("/")
    return {"worker": f"{run}/{name}", "role": role, "rank": int(rank), "state": "unreachable", "detail": error}


async def _answer(call: Awaitable[Any]) -> tuple[Any, str | None]:
    """The answer, or what came instead of it within the limit."""
    try:
        return await asyncio.wait_for(call, ANSWER_WITHIN_S), None
    except TimeoutError:
        return None, f"no answer within {ANSWER_WITHIN_S:g} s"
    except ray.exceptions.RayError as error:
        return None, type(error).__name__
