"""Shows what is live on every rank and engine, while they work: a small HTTP server in an actor of its own.

It asks each rank and the fleet for their views, which they answer on threads that never wait for the work. It listens
on loopback and answers whoever has the token; `inspector.json` in the run directory, readable by its owner alone, says
where and holds it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import ray
from aiohttp import web

ANSWER_WITHIN_S = 1.0
FILE = "inspector.json"
VIEW = "/api/slots"


@ray.remote(num_cpus=0, max_restarts=0)
class Inspector:
    """`workers`: handles by name. `manager`: the RolloutManager, which knows the engines."""

    def __init__(self, run: str, run_dir: str, workers: Mapping[str, Any], manager: Any) -> None:
        self._run, self._run_dir = run, Path(run_dir)
        self._workers, self._manager = dict(workers), manager
        self._token = secrets.token_urlsafe(32)

    async def start(self) -> str:
        """Listen on a free loopback port; returns the URL of the view."""
        app = web.Application()
        app.router.add_get(VIEW, self._slots)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}{VIEW}"
        self._announce({"url": url, "token": self._token})
        return url

    def _announce(self, address: Mapping[str, str]) -> None:
        temporary = self._run_dir / f".{FILE}"
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(address, file)
        os.replace(temporary, self._run_dir / FILE)

    async def _slots(self, request: web.Request) -> web.Response:
        offered = request.headers.get("Authorization", "")
        if not secrets.compare_digest(offered.encode(), f"Bearer {self._token}".encode()):
            return web.Response(status=401, text=f"the token is in {FILE} of the run directory\n")
        workers, engines = await asyncio.gather(self._worker_rows(), self._engine_rows())
        body = {"run": self._run, "source": "live", "workers": workers, "engines": engines}
        return web.json_response(body)

    async def _worker_rows(self) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(_answer(w.view.remote()) for w in self._workers.values()))
        return [
            _unreachable(self._run, name, error) if error else answer.to_json()
            for name, (answer, error) in zip(self._workers, answers, strict=True)
        ]

    async def _engine_rows(self) -> list[dict[str, Any]]:
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
