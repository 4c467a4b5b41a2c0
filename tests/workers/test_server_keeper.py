"""Whatever dies, in whatever way, nothing of a server is left."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import until
from workers.rollout import server_keeper

SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    time.sleep(600)
print(os.getpid(), child, flush=True)
{then}
"""
OWNER = """
import subprocess, sys
keeper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(keeper.pid, flush=True)
keeper.wait()
"""
WAIT_S = 15.0


def keeper(scratch: Path, then: str = "time.sleep(600)") -> list[str]:
    server = [sys.executable, "-c", SERVER.format(then=then)]
    return [sys.executable, server_keeper.__file__, str(scratch), "--", *server]


def pids(process: subprocess.Popen[str]) -> list[psutil.Process]:
    assert process.stdout is not None
    return [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.mark.parametrize("number", [2, 15, 9], ids=["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_owner_that_is_signalled_leaves_nothing(scratch: Path, number: int) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *keeper(scratch)], stdout=subprocess.PIPE, text=True)
    keepers, server = pids(owner), pids(owner)
    owner.send_signal(number)
    owner.wait(WAIT_S)
    assert gone(server + keepers)
    assert not scratch.exists()


def started(scratch: Path, then: str = "time.sleep(600)") -> subprocess.Popen[str]:
    return subprocess.Popen(keeper(scratch, then), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_closing_its_input_ends_a_server_that_does_not_listen_to_signals(scratch: Path) -> None:
    process = started(scratch)
    server = pids(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(WAIT_S)
    assert gone(server)


def test_a_server_that_ends_by_itself_takes_its_children_along_and_its_code_is_kept(scratch: Path) -> None:
    process = started(scratch, "sys.exit(7)")
    server = pids(process)
    assert process.wait(WAIT_S) == 7
    assert gone(server)


@pytest.mark.parametrize("number", [2, 15], ids=["SIGINT", "SIGTERM"])
def test_a_signal_does_not_part_a_keeper_from_its_server(scratch: Path, number: int) -> None:
    """Ctrl-C reaches every process of a terminal: who ends the server is its owner."""
    process = started(scratch)
    server = pids(process)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert all(p.is_running() for p in server)
    process.communicate()
    assert gone(server)


def test_nothing_is_left_of_a_keeper_that_is_killed(scratch: Path) -> None:
    """Its server's child does not notice: whoever goes on after the keeper sees to it, and to the files."""
    process = started(scratch)
    server = pids(process)
    process.kill()
    process.wait(WAIT_S)
    assert gone(server)
    until(lambda: not scratch.exists(), "the files are removed", timeout_s=WAIT_S)


def test_whoever_would_go_on_after_a_keeper_ends_with_it(scratch: Path) -> None:
    before = heirs(scratch)
    process = started(scratch)
    server = pids(process)
    assert len(heirs(scratch)) == len(before) + 2
    process.communicate()
    assert gone(server)
    until(lambda: not heirs(scratch), "no process of the keeper is left", timeout_s=WAIT_S)


def heirs(scratch: Path) -> list[psutil.Process]:
    """The keeper and who goes on after it: they have the same command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(scratch) in process.cmdline():
                found.append(process)
    return found
