"""What machine, journal and attestation add to a training step, against the same step with nothing but its bytes.

    python benchmarks/overhead.py [--steps 300] [--out benchmarks/results/overhead.json]

A step borrows the reference, lets the optimizer write, is attested and published. Without a machine it makes the same
copies and computes the same digests. The tensors have a few bytes, so that what differs is the machine. Both take turns
in one process; told are medians of the differences of such pairs, in wall and in processor time.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reporting import report
from state.gang import agree
from state.slots import Slot
from state.store import Key
from tests.state.toy import ToyWorker, ready_worker

ACTOR, REF = Key(Slot.ACTOR), Key(Slot.REF)


def governed(worker: ToyWorker, rollout_id: int) -> float:
    """Seconds that the driver spends on agreeing, which are none of the rank's."""
    with worker.machine.borrow(Slot.REF):
        pass
    with worker.machine.step(rollout_id) as scope:
        scope.before_write()
        worker.masters.step(0.0)
    attestation = worker.machine.attest()
    began = time.perf_counter()
    quorum = agree([attestation], f"p{rollout_id}")
    driver = time.perf_counter() - began
    with worker.machine.publishing(quorum) as permit:
        permit.require("publish")
    return driver


def bare(worker: ToyWorker, rollout_id: int) -> float:
    """The same copies and digests."""
    store = worker.store
    store.bring(REF, ACTOR)
    store.digest()
    store.bring(ACTOR, ACTOR)
    store.digest()
    worker.masters.step(0.0)
    store.digest()
    store.forget(ACTOR)
    store.digest()
    return 0.0


def timed(work: Callable[[ToyWorker, int], float], worker: ToyWorker, rollout_id: int) -> tuple[float, float]:
    """Wall and processor time, in milliseconds."""
    wall, processor = time.perf_counter(), time.process_time()
    driver = work(worker, rollout_id)
    return 1e3 * (time.perf_counter() - wall - driver), 1e3 * (time.process_time() - processor - driver)


def measure(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        workers = {governed: ready_worker(Path(one)), bare: ready_worker(Path(other))}
        taken: dict[Callable[[ToyWorker, int], float], list[tuple[float, float]]] = {governed: [], bare: []}
        for rollout_id in range(steps):
            order = (governed, bare) if rollout_id % 2 else (bare, governed)
            for work in order:
                taken[work].append(timed(work, workers[work], rollout_id))
    wall = [a[0] - b[0] for a, b in zip(taken[governed], taken[bare], strict=True)]
    processor = [a[1] - b[1] for a, b in zip(taken[governed], taken[bare], strict=True)]
    return {
        "governed_step_ms": round(median(t[0] for t in taken[governed]), 4),
        "same_copies_and_digests_ms": round(median(t[0] for t in taken[bare]), 4),
        "overhead_wall_ms": round(median(wall), 4),
        "overhead_wall_p90_ms": round(quantiles(wall, n=10)[-1], 4),
        "overhead_processor_ms": round(median(processor), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "steps": options.steps,
        **measure(options.steps),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
