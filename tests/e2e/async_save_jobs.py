"""What processes of test_async_save.py do: they write in the background as slowly as asked, and are killed in it."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from state.audit import audit
from tests.e2e.in_process_run import go
from tests.e2e.resume_jobs import Case, whole
from tests.workers.gang_processes import Place
from workers.megatron.torch_dist import PrivateCopy


def _instead_of(number: int, do: Callable[[PrivateCopy, Callable[[], Any]], Any]) -> None:
    """The copy number `number` of this process is written by `do`, from now on until the process ends."""
    real, count = PrivateCopy.write, iter(range(number + 1))

    def write(copy: PrivateCopy) -> Any:
        return do(copy, lambda: real(copy)) if next(count, None) == number else real(copy)

    PrivateCopy.write = write  # type: ignore[method-assign]


def killed_while_writing(place: Place, run_dir: Path, changes: dict[str, Any], rollout_id: int) -> None:
    """Killed with half of the file of `rollout_id` on disk, when the next rollout has been trained."""
    trained_on = threading.Event()

    def half(copy: PrivateCopy, write: Callable[[], Any]) -> None:
        write()
        (file,) = Path(copy.path).glob("*.distcp")
        os.truncate(file, file.stat().st_size // 2)
        assert trained_on.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)

    _instead_of(rollout_id, half)
    go(run_dir, changes, before_save=lambda saved: trained_on.set() if saved > rollout_id else None)


def continued(
    place: Place, run_dir: Path, changes: dict[str, Any], uncut_dir: Path, uncut: dict[str, Any]
) -> tuple[Case, Case, list[str]]:
    """A run that was never cut, what the same command does in `run_dir`, and what the audit finds in its saves."""
    never, rest = whole(place, uncut_dir, uncut), whole(place, run_dir, changes)
    # Publishes go through no driver and no fleet here, and so are in the journals of ranks alone.
    return never, rest, [str(finding) for finding in audit(run_dir).findings if "publish" not in finding.what]


def hold_second_write(while_there: Path) -> None:
    """In this process, the second copy is not written while a file stands at `while_there`."""

    def held(copy: PrivateCopy, write: Callable[[], Any]) -> Any:
        while while_there.exists():
            time.sleep(0.05)
        return write()

    _instead_of(1, held)


def refuse_second_write() -> None:
    """In this process, there is no room for the second copy."""

    def full(copy: PrivateCopy, write: Callable[[], Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _instead_of(1, full)
