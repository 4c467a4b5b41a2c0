"""The page and what it asks for, over HTTP. Reads journals; changes nothing."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.inspector import telling
from orchestrator.inspector.access import Access
from orchestrator.inspector.codes import CODES
from orchestrator.inspector.history import History
from orchestrator.inspector.lanes import Lane
from orchestrator.inspector.raster import Segments, Window, newest_first, rasterise, wide

STATIC = Path(__file__).parent / "static"
VIEW = "/api/slots"
REFRESH_S = 0.4
MOST_COLUMNS, MOST_WORDS, PAGE = 2000, 600, 100
Rows = Callable[[], Awaitable[dict[str, Any]]]


class Pages:
    """Serves one run directory. `live` answers with the rows of a run that can be asked; without it, the journals."""

    def __init__(self, run_dir: Path, access: Access, live: Rows | None = None) -> None:
        self._history, self._access, self._live = History(run_dir), access, live
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._segments: tuple[int, Segments] | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._access.guard])
        app.router.add_get("/", self._index)
        app.router.add_get(VIEW, self._slots)
        app.router.add_get("/api/summary", self._summary)
        app.router.add_get("/api/metrics", self._metrics)
        app.router.add_get("/api/window", self._window)
        app.router.add_get("/api/moment", self._moment)
        app.router.add_get("/api/transitions", self._transitions)
        app.router.add_static("/static", STATIC)
        return app

    async def fresh(self) -> History:
        """The history as of now, or of less than half a second ago."""
        async with self._lock:
            if time.monotonic() - self._read_at > REFRESH_S:
                await asyncio.to_thread(self._history.refresh)
                self._read_at = time.monotonic()
            return self._history

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _slots(self, request: web.Request) -> web.Response:
        return web.json_response(await self._live() if self._live else telling.rows(await self.fresh()))

    async def _summary(self, request: web.Request) -> web.Response:
        return web.json_response(telling.summary(await self.fresh(), time.time()) | {"codes": CODES})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.json_response(telling.metrics(await self.fresh()))

    async def _window(self, request: web.Request) -> web.Response:
        history, window = await self.fresh(), _asked_window(request.query)
        body = await asyncio.to_thread(self._draw, history, _chosen(history, request.query), window)
        return web.Response(body=body, content_type="application/octet-stream", headers={"Content-Encoding": "gzip"})

    def _draw(self, history: History, chosen: list[int], window: Window) -> bytes:
        """4 bytes: length of a JSON header; the header; then the cells, `[lanes, columns, 3]` bytes. Compressed."""
        segments, now = self._all_segments(), _until(history)
        cells = rasterise(segments, chosen, window, now)
        place = {lane: row for row, lane in enumerate(chosen)}
        words = [
            {
                "row": place[int(segments.lane[i])],
                "start": float(segments.start[i]),
                "end": min(float(segments.end[i]), now),
                "code": int(segments.code[i]),
                "version": history.lanes[int(segments.lane[i])].versions[int(segments.index[i])],
            }
            for i in wide(segments, chosen, window, now, columns=16)[:MOST_WORDS]
        ]
        header = {
            "start": window.start,
            "end": window.end,
            "columns": window.columns,
            "lanes": [{"name": history.lanes[i].name, "kind": history.lanes[i].kind} for i in chosen],
            "words": words,
            "marks": telling.marks(history, window),
            "problems": [p for p in history.problems if window.start <= p["at"] <= window.end][-MOST_WORDS:],
            "revision": history.revision,
        }
        head = json.dumps(header).encode()
        packed = zlib.compressobj(1, wbits=31)
        return packed.compress(struct.pack("<I", len(head)) + head + cells.tobytes()) + packed.flush()

    def _all_segments(self) -> Segments:
        history = self._history
        if self._segments is None or self._segments[0] != history.revision:
            self._segments = (history.revision, Segments.of(history.lanes, *history.ends()))
        return self._segments[1]

    async def _moment(self, request: web.Request) -> web.Response:
        """One segment of `lane`: the one at `time`, null where the lane shows nothing; or `index` itself."""
        history, query = await self.fresh(), request.query
        lane = _lane(history, query.get("lane", ""))
        index = int(_number(query, "index")) if "index" in query else lane.index_at(_number(query, "time"))
        if not 0 <= index < len(lane.times):
            return web.json_response(None)
        told = _ended(lane.tell(index), history)
        return web.json_response(None if "time" in query and told["end"] < _number(query, "time") else told)

    async def _transitions(self, request: web.Request) -> web.Response:
        """Newest first, `PAGE` from `offset`, of the lanes that `ranks` asks for."""
        history, query, window = await self.fresh(), request.query, _asked_window(request.query)
        offset = max(0, int(_number(query, "offset", 0)))
        chosen, segments = _chosen(history, query), self._all_segments()
        found = newest_first(segments, chosen, window)
        page = [
            history.lanes[int(segments.lane[i])].tell(int(segments.index[i])) for i in found[offset : offset + PAGE]
        ]
        return web.json_response({"total": len(found), "offset": offset, "page": PAGE, "transitions": page})


async def serve(pages: Pages, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listen; returns what ends it, and the address without a path."""
    runner = web.AppRunner(pages.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    bound, port = runner.addresses[0][:2]
    return runner, f"http://{f'[{bound}]' if ':' in bound else bound}:{port}"


def _until(history: History) -> float:
    """What has not ended lasts until now while the run does, else until the last that is known."""
    return time.time() if history.status() == "running" else history.last or 0.0


def _ended(told: dict[str, Any], history: History) -> dict[str, Any]:
    began, over = history.ends()
    ends = [end for start, end in zip(began, over, strict=True) if start <= told["start"]]
    limit = min(ends[-1] if ends else float("inf"), _until(history))
    return told | {"end": min(told["end"] or limit, limit)}


def _chosen(history: History, query: Mapping[str, str]) -> list[int]:
    try:
        return telling.chosen(history, query.get("ranks", ""))
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from error


def _lane(history: History, name: str) -> Lane:
    for lane in history.lanes:
        if lane.name == name:
            return lane
    raise web.HTTPNotFound(text=f"there is no lane {name!r}")


def _asked_window(query: Mapping[str, str]) -> Window:
    start, end = _number(query, "start"), _number(query, "end")
    columns = int(_number(query, "columns", 600))
    if not (end > start and 1 <= columns <= MOST_COLUMNS):
        raise web.HTTPBadRequest(text=f"a window needs start < end and 1 to {MOST_COLUMNS} columns")
    return Window(start, end, columns)


def _number(query: Mapping[str, str], name: str, default: float | None = None) -> float:
    text = query.get(name)
    if text is None and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise web.HTTPBadRequest(text=f"{name} is a number, not {text!r}")
    return value
