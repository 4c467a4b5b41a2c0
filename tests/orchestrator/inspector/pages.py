"""The inspector's server on a thread, for tests that come to it over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from orchestrator.inspector.access import Access
from orchestrator.inspector.server import Pages, Rows, serve


@dataclass(frozen=True)
class Served:
    address: str
    token: str

    @property
    def url(self) -> str:
        return f"{self.address}/?token={self.token}"

    def get(self, path: str, *, method: str = "GET", token: str | None = "", **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers, body; redirects are not followed. `token=None` sends none."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self.token}"
        request = Request(self.address + path, headers=headers, method=method)
        try:
            with build_opener(ProxyHandler({}), _Stay()).open(request, timeout=10) as answer:
                return answer.status, answer.headers, answer.read()
        except HTTPError as error:
            return error.code, error.headers, error.read()


class _Stay(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def served(run_dir: Path, live: Rows | None = None) -> Iterator[Served]:
    access, loop = Access(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    async def start() -> tuple[Any, str]:
        return await serve(Pages(run_dir, access, live), "127.0.0.1", 0)

    runner, address = wait(start())
    try:
        yield Served(address, access.token)
    finally:
        wait(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
