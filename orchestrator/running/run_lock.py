"""One driver at a time in the directory of a run, and in those that it saves checkpoints to.

A lock of the operating system: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.options.problems import ConfigError, Problem
from orchestrator.resume import resuming

LOCK = ".driver.lock"
_LATEST = 1e11
"""Seconds, wall time."""


@contextmanager
def alone(config: Config) -> Iterator[None]:
    """Raises `ConfigError` when another driver is at work in a directory that this one would write to."""
    directories = {
        "run.dir": resuming.run_dir(config),
        "checkpoint.save": resuming.save_root(config),
        "critic.save": resuming.critic_save_root(config),
    }
    with ExitStack() as held:
        for option, directory in directories.items():
            if directory is not None:
                held.enter_context(_alone_in(directory, option))
        yield


@contextmanager
def _alone_in(directory: Path, option: str) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise ConfigError([Problem(option, f"{directory} cannot be written to: {error.strerror}")]) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            used = f"{directory} is in use by another run{_described(_read(directory / LOCK))}"
            advice = "wait for it, stop it, or choose another run.name"
            raise ConfigError([Problem(option, f"{used}; {advice}")]) from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
        file.flush()
        yield


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(holder: Mapping[str, Any]) -> str:
    match holder:
        case {"pid": int(pid), "host": str(host), "since": float(since)} if 0 <= since < _LATEST:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
            return f" (process {pid} on {host}, since {at})"
    return ""
