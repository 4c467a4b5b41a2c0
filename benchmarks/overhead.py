"""What the slot machine adds to a training step, and what agreeing costs the driver, in one run.

    python benchmarks/overhead.py [--steps 300] [--out benchmarks/results/overhead.json]

A step here moves nothing and hashes tensors of a few bytes, so that what is left is the machine, its journal on disk
and the attestation. A thousand simulated ranks attest to 310 tensors each, as one of 0.6e9 parameters would.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from state.digest import PieceDigest, Region, ShardDigest
from state.gang import Attestation, GangId, agree
from state.slots import Slot, WorkerId
from tests.state.toy import ready_worker

RANKS, TENSORS = 1024, 310


def per_step(steps: int) -> dict[str, float]:
    """Milliseconds of processor time of a step with everything, without anything, and of its digests alone; medians."""
    with tempfile.TemporaryDirectory() as directory:
        worker = ready_worker(Path(directory))
        governed, bare, digests = [], [], []
        for rollout_id in range(steps):
            began = time.process_time()
            with worker.machine.step(rollout_id) as scope:
                scope.before_write()
                worker.masters.step(0.0)
            worker.machine.attest()
            governed.append(time.process_time() - began)
            began = time.process_time()
            worker.masters.step(0.0)
            bare.append(time.process_time() - began)
            began = time.process_time()
            worker.store.digest()
            worker.store.digest()
            digests.append(time.process_time() - began)
    with_all, without, hashing = (1e3 * median(times) for times in (governed, bare, digests))
    return {
        "step_ms": round(without, 4),
        "governed_step_ms": round(with_all, 4),
        "of_that_two_digests_ms": round(hashing, 4),
        "overhead_without_digests_ms": round(with_all - without - hashing, 4),
    }


def agreeing() -> float:
    """Milliseconds of the driver's processor time to agree, 8 tensor-parallel shards in 128 replicas."""
    shards = []
    for shard in range(8):
        region = Region((32,), (4 * shard,), (4,))
        shards.append(ShardDigest.of(PieceDigest(f"w{i}", "bfloat16", region, shard + i) for i in range(TENSORS)))
    gang = GangId(RANKS, 1, "c0ffee")
    ranks = [
        Attestation(WorkerId("run", "actor", r), gang, "resident.actor", Slot.ACTOR, 7, live, live.summary, 100 + r)
        for r, live in ((r, replace(shards[r % 8])) for r in range(RANKS))
    ]
    times = []
    for _ in range(5):
        began = time.process_time()
        agree(ranks, "p")
        times.append(time.process_time() - began)
    return round(1e3 * min(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or "CPU",
        "python": platform.python_version(),
        **per_step(options.steps),
        "agree_1024_ranks_ms": agreeing(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
