"""Real engines as actors of a real, local Ray cluster, published to over a real process group."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.config import Config, RunConfig
from orchestrator.engines import replacements, start_engines
from orchestrator.fleet import Fleet, FleetLimits
from orchestrator.rollouts.engine_lanes import EngineLost
from orchestrator.roster import NoEngineLeft
from state.digest import Piece, digest_tensor
from state.digest_records import Region
from state.engine_life import EnginePhase
from state.gang import Quorum, mint_permit
from state.journal import Journal
from state.slots import Slot, WeightId
from workers.config import ModelConfig, RolloutConfig, SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest
from workers.weights.distributed import DistributedSender
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import plan_send

ROOT = str(Path(__file__).parents[2])
ENV = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": ROOT}
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "eos_token_id": 1,
}
LIMITS = FleetLimits(start_s=120, ping_s=20, phase_s=30)
SAMPLING = SamplingConfig(max_response_len=4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            namespace="tests",
            runtime_env={"env_vars": ENV},
        )
        yield
        ray.shutdown()


def config(run: str) -> Config:
    return Config(
        run=RunConfig(name=run),
        model=ModelConfig(config=MODEL, dtype="float32"),
        rollout=RolloutConfig(num_engines=2, cpus_per_engine=0.5),
    )


class Weights:
    """A model of the trainers' side, all on one rank."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        fields = {k: v for k, v in MODEL.items() if k != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields), dtype=torch.float32)
        self.named: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}

    def tensors(self) -> Mapping[str, Tensor]:
        return self.named

    def pieces(self) -> Iterable[Piece]:
        return [Piece(n, Region.whole(t.shape), t) for n, t in self.named.items()]

    def manifest(self, version: int) -> Manifest:
        digests = tuple(digest_tensor(n, self.named[n]) for n in sorted(self.named))
        return Manifest("run", f"p{version}", Slot.ACTOR, WeightId(1, version), digests)


async def publish(fleet: Fleet, sender: DistributedSender, weights: Weights, version: int) -> tuple[str, ...]:
    manifest = weights.manifest(version)
    engines = await fleet.begin_update(manifest)
    holders = {t.name: ((0, Region.whole(t.shape)),) for t in manifest.tensors}
    plan = plan_send(holders, manifest.tensors, 4096)
    endpoint = sender.listen(plan, engines)
    assert endpoint is not None
    quorum = Quorum(manifest.publish_id, "run", "actor", Slot.ACTOR, manifest.weights, "", (), (), (), {})
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, mint_permit(quorum, "publish"), plan, weights)
        await fleet.receive(plan, Rendezvous(engines, (endpoint,)))
        await asyncio.wrap_future(sending)
    verdict = await fleet.prove(manifest)
    return await fleet.commit(manifest, [e for e, found in verdict.items() if found.holds])


def requests(n: int) -> list[GenerateRequest]:
    return [GenerateRequest(str(i), (3, 4, 5), i) for i in range(n)]


def test_engines_are_started_published_to_asked_lost_and_replaced(cluster: None, tmp_path: Path):
    links = start_engines(config("fleet"), [{}, {}])
    fleet = Fleet(links, Journal(tmp_path / "j", "fleet"), LIMITS, replacements=replacements(config("fleet"), [{}, {}]))
    sender = DistributedSender(0, host="127.0.0.1", device="cpu", timeout_s=20)

    async def story() -> None:
        first, second = await fleet.start()
        assert (first, second) == ("fleet/engine/0", "fleet/engine/1")
        views = [await link.call("view") for link in links]
        assert [v.engine_id for v in views] == [first, second]
        assert ray.get_actor(first, namespace="fleet") is not None
        with pytest.raises(EngineRefused, match="is stale"):
            await fleet.generate(first, requests(1), SAMPLING, WeightId(1, 1))

        assert await publish(fleet, sender, Weights(0), 1) == (first, second)
        one, other = [await fleet.generate(e, requests(8), SAMPLING, WeightId(1, 1)) for e in (first, second)]
        assert one == other
        assert {r.versions for r in one} == {(WeightId(1, 1),)}

        assert await publish(fleet, sender, Weights(1), 2) == (first, second)
        with pytest.raises(EngineRefused):
            await fleet.generate(first, requests(1), SAMPLING, WeightId(1, 1))

        endless = SamplingConfig(max_response_len=100_000, stop_token_ids=())
        running = asyncio.create_task(fleet.generate(first, requests(64), endless, WeightId(1, 2)))
        while not (await links[0].call("view")).in_flight:
            pass
        assert (await links[0].call("prove")).publish_id is None
        os.kill(views[0].pid, 9)
        with pytest.raises(EngineLost, match=f"{first} died over 64 requests"):
            await running
        assert await fleet.reconcile() == (second,)
        assert await publish(fleet, sender, Weights(2), 3) == (second,)

        third = "fleet/engine/2"
        async with asyncio.timeout(120):
            while {s.engine_id: s.phase for s in fleet.views()}[third] is EnginePhase.STARTING:
                await asyncio.sleep(0.05)
        assert fleet.serving(WeightId(1, 3)) == (second,)
        assert await publish(fleet, sender, Weights(3), 4) == (third, second)
        one, other = [await fleet.generate(e, requests(8), SAMPLING, WeightId(1, 4)) for e in (third, second)]
        assert one == other

        fleet.shutdown()
        with pytest.raises(NoEngineLeft):
            await fleet.reconcile()
        assert _ended([v.pid for v in views])

    asyncio.run(story())
    sender.close()
    assert [s.phase for s in fleet.views()] == [EnginePhase.DEAD] * 3


@ray.remote(num_cpus=0)
class Owner:
    """A process that starts engines, as the rollout manager does."""

    async def start(self, run: str) -> list[int]:
        self.links = start_engines(config(run), [{}])
        return [os.getpid(), *[(await link.call("view")).pid for link in self.links]]


@pytest.mark.prove
def test_engines_end_with_the_process_that_started_them(cluster: None):
    owner: Any = Owner.remote()  # type: ignore[attr-defined]
    owner_pid, *engine_pids = ray.get(owner.start.remote("owned"), timeout=120)
    os.kill(owner_pid, 9)
    assert _ended(engine_pids)


def _ended(pids: list[int]) -> bool:
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=20)
    return not alive
