"""SIGKILL at every boundary where a process changes the file system, in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def die_before_change(number: int) -> None:
    """From now on this process is killed as it is about to make its change number `number` (from 0): a file opened for
    writing, a directory made, a rename, a removal. What it has buffered is lost, as in a real kill."""
    left = iter(range(number))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING)
        if changes and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_at_every_change(work: Callable[[int], None]) -> Iterator[int]:
    """For each number of a change: yields after a process was killed there in `work(number)`. Ends with the first that
    lived to the end; the numbers say how many changes there are."""
    number = 0
    while _killed(work, number):
        yield number
        number += 1


def _killed(work: Callable[[int], None], number: int) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_before_change(number)
            work(number)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, f"the process failed by itself at change {number}"
    return False
