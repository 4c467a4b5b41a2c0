"""How long a publish takes to one, two and four engines. Prints one JSON.

    python benchmarks/publish_scaling.py

Real embedded engines, each an actor of its own on the CPU, get the weights of one trainer rank over a gloo group, and
prove them: all steps of a publish but the gang's. `one_after_the_other_s` is what as many publishes to one engine take.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.config import Config, RunConfig
from orchestrator.engines import start_engines
from orchestrator.fleet import Fleet, FleetLimits
from state.digest import Piece, digest_tensor
from state.digest_records import Region
from state.gang import Quorum, mint_permit
from state.journal import Journal
from state.slots import Slot, WeightId
from workers.config import ModelConfig, RolloutConfig
from workers.weights.distributed import DistributedSender
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import plan_send

REPO = Path(__file__).parents[1]
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
PHASES = ("prepare_s", "transfer_s", "prove_s", "commit_s")


class Weights:
    """A model on the trainers' side, all on one rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        fields = {k: v for k, v in MODEL.items() if k != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields), dtype=torch.float32)
        self.named: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
        self.digests = tuple(digest_tensor(name, self.named[name]) for name in sorted(self.named))

    def tensors(self) -> Mapping[str, Tensor]:
        return self.named

    def pieces(self) -> Iterable[Piece]:
        return [Piece(name, Region.whole(t.shape), t) for name, t in self.named.items()]


async def publish(fleet: Fleet, sender: DistributedSender, weights: Weights, version: int) -> list[float]:
    """Seconds of each phase."""
    times = [time.perf_counter()]
    manifest = Manifest("bench", f"p{version}", Slot.ACTOR, WeightId(1, version), weights.digests)
    await fleet.reconcile()
    engines = await fleet.begin_update(manifest)
    times.append(time.perf_counter())
    holders = {t.name: ((0, Region.whole(t.shape)),) for t in manifest.tensors}
    plan = plan_send(holders, manifest.tensors, 16 << 20)
    endpoint = sender.listen(plan, engines)
    assert endpoint is not None
    quorum = Quorum(manifest.publish_id, "bench", "actor", Slot.ACTOR, manifest.weights, "", (), (), (), {})
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, mint_permit(quorum, "publish"), plan, weights)
        await fleet.receive(plan, Rendezvous(engines, (endpoint,)))
        await asyncio.wrap_future(sending)
    times.append(time.perf_counter())
    verdict = await fleet.prove(manifest)
    times.append(time.perf_counter())
    committed = await fleet.commit(manifest, [e for e, found in verdict.items() if found.holds])
    times.append(time.perf_counter())
    assert committed == engines
    return [after - before for before, after in pairwise(times)]


def measure(engines: int, weights: Weights, repeats: int) -> dict[str, float]:
    config = Config(
        run=RunConfig(name=f"bench{engines}"),
        model=ModelConfig(config=MODEL, dtype="float32"),
        rollout=RolloutConfig(num_engines=engines, cpus_per_engine=1.0),
    )
    sender = DistributedSender(0, host="127.0.0.1", device="cpu", timeout_s=60)

    async def all_publishes() -> list[list[float]]:
        with tempfile.TemporaryDirectory() as directory:
            links = start_engines(config, [{}] * engines)
            fleet = Fleet(links, Journal(Path(directory) / "fleet.jsonl", "fleet"), FleetLimits())
            await fleet.start()
            done = [await publish(fleet, sender, weights, version) for version in range(repeats + 1)]
            fleet.shutdown()
            return done[1:]  # the first one forms the group

    publishes = asyncio.run(all_publishes())
    sender.close()
    phases = {
        name: statistics.median(column) for name, column in zip(PHASES, zip(*publishes, strict=True), strict=True)
    }
    return {"publish_s": statistics.median(map(sum, publishes)), **phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
    ray.init(
        address="local",
        num_cpus=max(given.engines) + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    weights = Weights()
    try:
        measured: dict[str, dict[str, float]] = {str(n): measure(n, weights, given.repeats) for n in given.engines}
    finally:
        ray.shutdown()
    one = measured[str(given.engines[0])]["publish_s"]
    for n, result in measured.items():
        result["more_than_one_s"] = result["publish_s"] - one
        result["one_after_the_other_s"] = int(n) * one
    about: dict[str, Any] = {
        "benchmark": "publish_scaling",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "command": " ".join(["python", "benchmarks/publish_scaling.py", *sys.argv[1:]]),
        "bytes": sum(t.nbytes for t in weights.named.values()),
    }
    print(json.dumps(about | {"engines": measured}, indent=2))


if __name__ == "__main__":
    main()
