"""Runs one function on several ranks, each a process of its own, and brings back their results.

    results = run_gang("tests.workers.my_jobs:score", world_size=2, args=(directory,))

The function is named by import path and called as `score(place, directory)` on each rank; its result and arguments
are pickled. It makes its own process group from `place.init_method` (or uses `gloo(place)`, for jobs that need no
more than torch). Processes are forked from a server that has torch and Megatron imported already.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = "tests.workers.gang_preload"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs: its rank, and how the ranks of its gang find each other."""

    rank: int
    world_size: int
    init_method: str


class GangFailed(Exception):
    """The first rank that failed, with its traceback."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank
        self.why = why


def run_gang(job: str, world_size: int, args: Sequence[Any] = (), *, time_limit_s: float = 60.0) -> list[Any]:
    """Results of `job` (`package.module:function`) by rank. Raises GangFailed at the first failure or the limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    deadline = time.monotonic() + time_limit_s
    with tempfile.TemporaryDirectory(prefix="gang-") as directory:
        running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess]] = {}
        try:
            for rank in range(world_size):
                place = Place(rank, world_size, f"file://{directory}/rendezvous")
                reader, writer = context.Pipe(duplex=False)
                started = context.Process(target=_rank, args=(job, place, tuple(args), writer))
                started.start()
                writer.close()
                running[reader] = (rank, started)
            results = _collect(running, deadline, job)
            for _, process in running.values():
                process.join(timeout=max(1.0, deadline - time.monotonic()))
            return results
        finally:
            for reader, (_, process) in running.items():
                _kill_with_children(process)
                process.join(timeout=5.0)
                reader.close()


@contextmanager
def gloo(place: Place, timeout_s: float = 30.0) -> Iterator[None]:
    """The default process group of plain torch, for the length of a `with`."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _kill_with_children(process: multiprocessing.process.BaseProcess) -> None:
    """A rank leads a process group of its own; a rank that has not come so far has no children yet."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _collect(
    running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess]], deadline: float, job: str
) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = list(running)
    while waiting:
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(running[reader][0] for reader in waiting)
            raise GangFailed(late[0], f"{job} did not end in time on ranks {late}")
        for reader in waiting[:]:
            if reader not in ready:
                continue
            rank, process = running[reader]
            try:
                message = reader.recv_bytes()
            except EOFError:
                process.join(timeout=5)
                raise GangFailed(rank, f"{job} died without a result, exit code {process.exitcode}") from None
            succeeded, value = pickle.loads(message)
            if not succeeded:
                raise GangFailed(rank, value)
            results[rank] = value
            waiting.remove(reader)
    return [results[rank] for rank in range(len(running))]


def _rank(job: str, place: Place, args: tuple[Any, ...], writer: Connection) -> None:
    os.setpgid(0, 0)
    os.environ.update({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"})
    try:
        import torch

        torch.set_num_threads(1)
        module, _, name = job.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        message = pickle.dumps((True, function(place, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    writer.send_bytes(message)
    writer.close()
