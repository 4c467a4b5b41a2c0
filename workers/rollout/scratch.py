"""Scratch directories: one whose users have all died, however they died, is removed by whoever makes the next one on
this machine.

A directory is locked by its users (`flock`, which the kernel gives back for the dead).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

PREFIX = "slotwise-sglang-"


class Scratch:
    """A directory of its own in `root` (unset: where temporary files go). A child that inherits `lock` uses it too."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        remove_abandoned(root)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self.lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if self.path.exists():
                self._open = ExitStack()
                self._open.callback(os.close, self.lock)
                return
            os.close(self.lock)  # it was taken for an abandoned one before it was locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._open.close()


def remove_abandoned(root: Path) -> None:
    """What nobody uses any more; other people's directories stay."""
    for path in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
