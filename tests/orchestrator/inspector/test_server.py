"""The page's server: who may look, what it answers, and that it reaches for nothing outside."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generated_run import generate
from orchestrator.cli import main
from orchestrator.exit_codes import ExitCode
from orchestrator.inspector.access import announce
from orchestrator.inspector.server import STATIC
from tests.orchestrator.inspector.pages import Served, served

BEGAN = 1.8e9
PATHS = ("/", "/api/slots", "/api/summary", "/api/metrics", "/static/page.js", "/static/vendor/uplot/LICENSE")
WINDOW = f"start={BEGAN}&end={BEGAN + 100}&columns=50"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "run"
    generate(4, 2, 4, BEGAN, trouble=True).write(directory)
    return directory


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Iterator[Served]:
    with served(run_dir) as one:
        yield one


def window(body: bytes) -> tuple[dict[str, Any], bytes]:
    plain = zlib.decompress(body, wbits=31)
    (length,) = struct.unpack("<I", plain[:4])
    return json.loads(plain[4 : 4 + length]), plain[4 + length :]


class TestAccess:
    @pytest.mark.parametrize("path", PATHS)
    def test_nothing_is_shown_without_the_token(self, page: Served, path: str) -> None:
        for token in (None, "wrong", page.token[:-1]):
            status, headers, body = page.get(path, token=token)
            assert status == 401
            assert b"inspector.json" in body
            assert "Set-Cookie" not in headers
        assert page.get(f"{path}?token=wrong", token=None)[0] == 401

    @pytest.mark.parametrize("path", PATHS)
    def test_everything_is_shown_to_a_bearer(self, page: Served, path: str) -> None:
        status, headers, _ = page.get(path)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"

    def test_opening_it_with_the_token_leaves_a_cookie_and_no_token_in_the_address(self, page: Served) -> None:
        status, headers, _ = page.get(f"/?token={page.token}", token=None)
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert page.get("/api/slots", token=None, Cookie=cookie.split(";")[0])[0] == 200
        assert page.get("/api/slots", token=None, Cookie=cookie.split("=")[0] + "=wrong")[0] == 401

    def test_a_token_that_is_no_text_is_a_wrong_one(self, page: Served) -> None:
        for odd in ("\xe9\xff", "\xed\xa0\x80"):
            assert page.get("/", token=odd)[0] == 401
            assert page.get("/", token=None, Cookie=f"slotwise_{page.address.rpartition(':')[2]}={odd}")[0] == 401
        assert page.get("/?token=%E9%ED%A0%80", token=None)[0] == 401

    @pytest.mark.parametrize("path", ["//elsewhere.example/", "///elsewhere.example/", "/%5C/elsewhere.example/"])
    def test_it_sends_nobody_to_another_host(self, page: Served, path: str) -> None:
        status, headers, _ = page.get(f"{path}?token={page.token}", token=None)
        assert status == 303
        assert re.match(r"/[^/\\]", headers["Location"])

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    def test_it_is_only_for_looking(self, page: Served, method: str) -> None:
        assert page.get("/api/slots", method=method)[0] == 405

    @pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/x"])
    def test_no_other_file_is_served(self, page: Served, path: str) -> None:
        assert page.get(path)[0] in (403, 404)

    def test_the_address_is_readable_by_its_owner_alone(self, tmp_path: Path) -> None:
        announce(tmp_path, {"url": "u", "token": "t"})
        announce(tmp_path, {"url": "u2", "token": "t"})
        assert stat.S_IMODE((tmp_path / "inspector.json").stat().st_mode) == 0o600
        assert os.listdir(tmp_path) == ["inspector.json"]


def test_nothing_is_fetched_from_outside() -> None:
    for file in STATIC.rglob("*"):
        if file.suffix in (".html", ".css", ".js") and "vendor" not in file.parts:
            text = file.read_text()
            assert not re.search(r"https?://|//[a-z]+\.", text), file
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file


def test_the_chart_library_is_there_with_its_licence() -> None:
    assert "MIT License" in (STATIC / "vendor" / "uplot" / "LICENSE").read_text()


class TestWindow:
    def test_has_a_cell_for_each_column_of_each_lane(self, page: Served) -> None:
        header, cells = window(page.get(f"/api/window?{WINDOW}")[2])
        assert [lane["name"] for lane in header["lanes"]][:2] == ["actor/0", "actor/1"]
        assert len(cells) == 6 * 50 * 3
        assert {mark["outcome"] for mark in header["marks"]} == {"committed", "aborted"}
        assert window(page.get(f"/api/window?start={BEGAN}&end={BEGAN + 100}&columns=800")[2])[0]["words"]

    def test_of_some_ranks_has_these(self, page: Served) -> None:
        header, _ = window(page.get(f"/api/window?{WINDOW}&ranks=1,3")[2])
        assert [lane["name"] for lane in header["lanes"] if lane["kind"] == "rank"] == ["actor/1", "actor/3"]

    @pytest.mark.parametrize(
        "query",
        ["", "start=1&end=1", "start=2&end=1", "start=nan&end=3", "start=0&end=inf", "start=x&end=2",
         "start=1&end=2&columns=0", "start=1&end=2&columns=99999", f"{WINDOW}&ranks=all"],
    )  # fmt: skip
    def test_that_is_none_is_refused_in_words(self, page: Served, query: str) -> None:
        status, _, body = page.get(f"/api/window?{query}")
        assert status == 400
        assert body.strip()


def test_a_moment_is_found_by_time_and_by_number(page: Served) -> None:
    told = json.loads(page.get(f"/api/moment?lane=actor/0&time={BEGAN + 45}")[2])
    assert told["start"] <= BEGAN + 45 <= told["end"]
    assert json.loads(page.get(f"/api/moment?lane=actor/0&index={told['index']}")[2]) == told
    assert json.loads(page.get("/api/moment?lane=actor/0&time=1")[2]) is None
    assert json.loads(page.get(f"/api/moment?lane=actor/0&time={BEGAN + 60}")[2]) is None, "between two incarnations"
    assert json.loads(page.get("/api/moment?lane=actor/0&index=99999")[2]) is None
    assert page.get("/api/moment?lane=nobody&time=1")[0] == 404


def test_the_last_moment_before_an_incarnation_ended_ends_with_it(page: Served) -> None:
    summary = json.loads(page.get("/api/summary")[2])
    poisoned = next(p for p in summary["problems"]["newest"] if p["what"] == "poisoned")
    told = json.loads(page.get(f"/api/moment?lane={poisoned['lane']}&time={poisoned['at'] + 0.001}")[2])
    assert told["state"] == "poisoned"
    assert 0 < told["end"] - told["start"] < 20


def test_transitions_come_a_page_at_a_time_newest_first(page: Served) -> None:
    query = f"start={BEGAN}&end={BEGAN + 500}"
    first = json.loads(page.get(f"/api/transitions?{query}")[2])
    second = json.loads(page.get(f"/api/transitions?{query}&offset=100")[2])
    times = [t["start"] for t in first["transitions"] + second["transitions"]]
    assert times == sorted(times, reverse=True)
    assert len(first["transitions"]) == 100 < first["total"]


def test_rows_of_a_live_run_are_what_it_answers(run_dir: Path) -> None:
    async def live() -> dict[str, Any]:
        return {"run": "r", "source": "live", "workers": [], "engines": []}

    with served(run_dir, live) as page:
        assert json.loads(page.get("/api/slots")[2])["source"] == "live"


class TestCommand:
    def test_serves_a_run_directory_until_interrupted(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", "orchestrator", "inspect", str(run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address, _, token = process.stdout.readline().split()[1].partition("/?token=")
            try:
                assert address.startswith("http://127.0.0.1:")
                assert json.loads(Served(address, token).get("/api/slots")[2])["run"] == "qwen3-grpo"
                assert Served(address, token).get("/", token="wrong")[0] == 401
            finally:
                process.send_signal(2)
            assert process.wait(10) == ExitCode.INTERRUPTED

    def test_refuses_what_is_no_run_directory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(tmp_path)]) == ExitCode.CONFIG
        assert "holds no journal/" in capsys.readouterr().err

    def test_refuses_a_port_that_is_taken(
        self, page: Served, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["inspect", str(run_dir), "--port", page.address.rsplit(":", 1)[1]]) == ExitCode.CONFIG
        assert "cannot listen" in capsys.readouterr().err
