"""Runs one command and sees to it that nothing of it is left: `python server_keeper.py SCRATCH -- COMMAND`.

The command gets a session of its own, which is killed when its first process ends, or when this process's standard
input closes: the kernel closes it for a parent that dies, in whatever way. SCRATCH is removed at the end. Killed, not
asked: a server has nothing to save, and takes seconds to say goodbye.

If this process is killed itself, as Ray does with the children of a worker that ends, the kernel kills the command's
first process (PR_SET_PDEATHSIG), and a process that belongs to nobody sees to the rest.

Run as a file, by any Python: imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
_LIMIT_S = 10.0


def _before_exec(parent: int) -> Callable[[], None]:
    """For the child, between fork and exec: it dies with its parent, and hears signals."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _group_lives(leader: int) -> bool:
    """Whether a process of the group runs; what has died and waits for someone to notice does not count."""
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(stat) as file:
            state, _parent, group = file.read().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                return True
    return False


def _end(leader: int) -> None:
    """Every process of the leader's session is gone when this returns."""
    deadline = time.monotonic() + _LIMIT_S
    while _group_lives(leader) and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        time.sleep(_POLL_S)


def _appoint_heir(scratch: str) -> int:
    """Starts a process, nobody's child, that does what is left to do when this one is killed. It is told over a pipe,
    whose other end this is, whom the command leads; and, once nothing is left to do, so."""
    hears, says = os.pipe()
    if middle := os.fork():
        os.waitpid(middle, 0)
        os.close(hears)
        return says
    if os.fork():
        os._exit(0)
    os.setsid()
    os.close(says)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    told = b""
    while heard := os.read(hears, 64):
        told += heard
    leader, _, done = told.partition(b" ")
    if not done:
        if leader:
            _end(int(leader))
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def keep(scratch: str, command: list[str]) -> int:
    """Returns the command's exit code (negative: the signal that ended it)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end comes over standard input, whoever is signalled
    heir = _appoint_heir(scratch)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_before_exec(os.getpid())
    )
    os.write(heir, str(child.pid).encode())
    exited = os.pidfd_open(child.pid)
    select.select([0, exited], [], [])
    _end(child.pid)
    shutil.rmtree(scratch, ignore_errors=True)
    os.write(heir, b" done")
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[sys.argv.index("--") + 1 :]))
