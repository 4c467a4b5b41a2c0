"""Runs tests and scenarios against many copies of the packages: imports what is slow once, then forks for each copy.

    python -m tests.prove.mutant_server JOBS.json

JOBS.json: a list of {"root": directory of a copy, "seconds": limit} and either "tests": what pytest is to run there, or
"scenario": `module:function` in this directory, and "out": the run directory that it is to write. Prints a JSON list:
by job what pytest ended with, or 0; the signal's number, negative, where the limit ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import hypothesis
import pydantic
import pytest
import ray
import torch
import transitions

SLOW_TO_IMPORT = (hypothesis, pydantic, ray, torch, transitions)
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
    """In the child: the copy's code, with nothing of ours imported before. Never returns."""
    signal.alarm(job["seconds"])
    root = job["root"]
    os.chdir(root)
    told = "scenario" if "scenario" in job else "pytest"
    out = os.open(f"{told}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = root
    sys.path.insert(0, root)
    for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
        del sys.modules[name]
    code = _scenario(job["scenario"], Path(job["out"])) if told == "scenario" else _tests(root, job["tests"])
    sys.stdout.flush()
    os._exit(code)


def _tests(root: str, tests: list[str]) -> int:
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--basetemp", f"{root}/tmp", *tests]))


def _scenario(name: str, directory: Path) -> int:
    module, _, function = name.partition(":")
    try:
        directory.mkdir(parents=True)
        getattr(importlib.import_module(f"tests.prove.{module}"), function)(directory)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
