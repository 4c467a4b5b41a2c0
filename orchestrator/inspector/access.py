"""Who may look: whoever has the token, as a bearer or, once the page was opened with it, as a cookie."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

FILE = "inspector.json"
COOKIE = "slotwise"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Access:
    """One token, for the life of one server."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets the token's holder read. `?token=` is answered by a cookie and the same address without it."""
        cookie = f"{COOKIE}_{request.url.port}"
        if self._is(request.query.get("token")):
            answer: web.StreamResponse = web.Response(status=303, headers={"Location": _here(request)})
            answer.set_cookie(cookie, self.token, httponly=True, samesite="Strict", path="/")
        elif self._is(_bearer(request)) or self._is(request.cookies.get(cookie)):
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = _told(error.status, f"{error.text}\n")
        else:
            return _told(401, f"the token is in {FILE} of the run directory, or in what `slotwise inspect` printed\n")
        answer.headers.update(HEADERS)
        return answer

    def _is(self, offered: str | None) -> bool:
        return offered is not None and secrets.compare_digest(
            offered.encode(errors="surrogatepass"), self.token.encode()
        )


def announce(run_dir: Path, address: Mapping[str, str]) -> None:
    """Write where a run answers, and with which token, for its owner alone."""
    temporary = run_dir / f".{FILE}"
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(address, file)
    os.replace(temporary, run_dir / FILE)


def _bearer(request: web.Request) -> str | None:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if kind == "Bearer" else None


def _here(request: web.Request) -> str:
    """The path alone, on this host: what begins with two slashes would be another."""
    return "/" + request.rel_url.raw_path.lstrip("/\\")


def _told(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers=HEADERS)
