"""Runs tests against many copies of the packages: imports what is slow once, then forks for each copy.

    python -m tests.prove.mutant_server JOBS.json

JOBS.json: a list of {"root": directory of a copy, "tests": what pytest is to run there, "seconds": limit}. Prints a
JSON list: what pytest ended with, by job; the signal's number, negative, where the limit ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import ray
import torch
import transitions

SLOW_TO_IMPORT = (hypothesis, ray, torch, transitions)
OURS = ("state", "workers", "orchestrator", "tests")
AT_ONCE = 2


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text())
    codes: list[int | None] = [None] * len(jobs)
    running: dict[int, int] = {}
    for number, job in enumerate(jobs):
        if len(running) == AT_ONCE:
            _reap(running, codes)
        pid = os.fork()
        if pid == 0:
            _run(job)
        running[pid] = number
    while running:
        _reap(running, codes)
    print(json.dumps(codes))


def _reap(running: dict[int, int], codes: list[int | None]) -> None:
    pid, status = os.wait()
    codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)


def _run(job: dict[str, Any]) -> None:
    """In the child: pytest on the copy, with nothing of ours imported before. Never returns."""
    signal.alarm(job["seconds"])
    root = job["root"]
    os.chdir(root)
    out = os.open("pytest.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = root
    sys.path.insert(0, root)
    for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
        del sys.modules[name]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--basetemp", f"{root}/tmp", *job["tests"]])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main(sys.argv[1])
