"""What a server refuses, in whatever shape it says so, is an error with the server's words."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient

ANSWERS: dict[str, tuple[int, Any]] = {
    "/fine": (200, {"success": True, "message": "x"}),
    "/unsuccessful": (200, {"success": False, "message": "the group does not exist"}),
    "/refused": (400, {"success": False, "message": "no session is open"}),
    "/error": (400, {"error": {"message": "the model is too long"}}),
    "/detail": (404, {"detail": "Not Found"}),
    "/text": (400, "Flush cache failed."),
    "/empty": (500, ""),
}


class Stub(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        status, content = ANSWERS[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write((content if isinstance(content, str) else json.dumps(content)).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), Stub)


@pytest.fixture(params=["127.0.0.1", "::1"])
def client(request: pytest.FixtureRequest) -> Iterator[SglangClient]:
    try:
        server = Server(request.param)
    except OSError:
        pytest.skip(f"this machine cannot listen on {request.param}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield SglangClient(request.param, server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_success_is_its_answer(client: SglangClient) -> None:
    assert client.post("/fine", {}, limit_s=5) == {"success": True, "message": "x"}


@pytest.mark.parametrize(
    ("path", "words", "status"),
    [
        ("/unsuccessful", "the group does not exist", 200),
        ("/refused", "no session is open", 400),
        ("/error", "the model is too long", 400),
        ("/detail", "Not Found", 404),
        ("/text", "Flush cache failed", 400),
        ("/empty", "no reason given", 500),
    ],
)
def test_every_refusal_is_raised_with_the_servers_words(
    client: SglangClient, path: str, words: str, status: int
) -> None:
    with pytest.raises(ServerRefused, match=words) as error:
        client.post(path, {}, limit_s=5)
    assert error.value.status == status
    assert path in str(error.value)


def test_a_server_that_is_not_there_or_does_not_answer_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(ServerSilent, match=f"127.0.0.1:{port} did not answer /x within 0.2 s"):
            SglangClient("127.0.0.1", port).post("/x", {}, limit_s=0.2)
    with pytest.raises(ServerSilent, match="ConnectionRefusedError"):
        SglangClient("127.0.0.1", port).get("/x", limit_s=1)
