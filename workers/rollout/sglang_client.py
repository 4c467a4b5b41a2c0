"""The HTTP side of an SGLang server: one call, one answer, and every refusal in the server's own words."""

from __future__ import annotations

import http.client
import json
from typing import Any

from state.errors import SlotwiseError
from workers.ports import host_port


class ServerRefused(SlotwiseError):
    """The server answered, and said no; the message has its reason. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerSilent(SlotwiseError):
    """The server did not answer: no connection, a broken one, or none within the limit."""


class SglangClient:
    """Calls from any thread. Each opens a connection of its own, so that a long one holds up no other."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    @property
    def address(self) -> str:
        return host_port(self._host, self._port)

    def get(self, path: str, *, limit_s: float) -> Any:
        return self._ask("GET", path, None, limit_s)

    def post(self, path: str, body: dict[str, Any], *, limit_s: float) -> Any:
        """The decoded answer (its text when it is not JSON). `ServerRefused` for an error status, and for an answer
        that says it was not a success; `ServerSilent` when there was none within `limit_s` seconds."""
        return self._ask("POST", path, json.dumps(body), limit_s)

    def _ask(self, method: str, path: str, body: str | None, limit_s: float) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            what = f"within {limit_s:g} s" if isinstance(error, TimeoutError) else f"({type(error).__name__}: {error})"
            raise ServerSilent(f"the server at {self.address} did not answer {path} {what}") from error
        finally:
            connection.close()
        answer = _decoded(text)
        if status >= 400 or (isinstance(answer, dict) and answer.get("success") is False):
            raise ServerRefused(f"{path}: {_reason(answer)} (status {status})", status)
        return answer


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reason(answer: Any) -> str:
    """The server words its refusals in several places."""
    if isinstance(answer, dict):
        for key in ("message", "detail", "error"):
            if said := answer.get(key):
                return _reason(said)
    return str(answer).strip() or "no reason given"
