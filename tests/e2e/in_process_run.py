"""A whole run in one process: the real loop, rank, engine, data, rewards, checkpoints and plan to resume, without Ray.

For tests that need many runs. What is left out is only what carries calls between processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.config import Config
from orchestrator.loops import train_loop
from orchestrator.publish import Published
from orchestrator.resume import continuity, resuming
from orchestrator.rollouts.desk import RolloutDesk, RolloutRefs
from orchestrator.running.gang_specs import critic_specs, worker_specs
from orchestrator.running.interrupts import Stop
from orchestrator.running.live_run import LiveRun
from orchestrator.running.run_dir import RunDir, config_hash
from orchestrator.tracking.jsonl import JsonlTracker
from state import checkpoints
from state.continuity import Probe
from state.gang import GangId, Quorum, agree
from state.resume import ResumePlan
from state.slots import WeightId
from tests.e2e.runs import TINY, journal, lines, merged
from workers.batch import TrainShard
from workers.config import SamplingConfig
from workers.megatron import parallel, worker
from workers.megatron.spec import WorkerSpec
from workers.megatron.worker import MegatronRank
from workers.rollout.embedded import EmbeddedEngine
from workers.rollout.protocol import GenerateRequest, GenerateResult, mismatches
from workers.weights.base import Sink
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan, plan_send
from workers.weights.views import torch_dtype

Trained = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""Rollout, group, index, prompt, response."""


def configuration(run_dir: Path, changes: Mapping[str, Any]) -> Config:
    base = merged(TINY, {"run": {"name": "run", "dir": str(run_dir)}, "train": {"num_workers": 1}})
    return Config.model_validate(merged(base, dict(changes)))


class Gang:
    """`TrainGroup` of one rank in this process. Whatever it trains on is written down."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.rank = MegatronRank(spec, "127.0.0.1")
        self.trained: list[Trained] = []
        self.rank.init(self.rank.open_meeting())

    def agree(self, publish_id: str, *, with_kept: bool = False) -> Quorum:
        return agree([self.rank.attest(with_kept=with_kept)], publish_id)

    @property
    def role(self) -> str:
        return self.rank._spec.worker.role

    def train(self, shards: Sequence[TrainShard], given: Any = None) -> Mapping[str, float]:
        (shard,) = shards
        metrics = self.rank.train(shard, given)
        assert metrics is not None
        self.trained += [(shard.rollout_id, s.group_id, s.index, s.prompt_ids, s.response_ids) for s in shard.samples]
        return metrics

    def probe(self) -> Probe:
        probe = self.rank.probe()
        assert probe is not None
        return probe

    def save(self, quorum: Quorum, path: str, *, background: bool) -> None:
        self.rank.save(quorum, path, background=background)

    def finish_save(self, publish_id: str) -> None:
        self.rank.end_save(publish_id, [self.rank.written(publish_id)])

    def export(self, quorum: Quorum, path: str) -> None:
        self.rank.export(quorum, path)


@dataclass(frozen=True)
class Gangs:
    """`gangs.Gangs` in this process. Gangs of one rank share their process groups, which no message ever enters."""

    actor: Gang
    critic: Gang | None

    @property
    def all(self) -> tuple[Gang, ...]:
        return (self.actor,) if self.critic is None else (self.critic, self.actor)

    def train(self, shards: Sequence[TrainShard]) -> Mapping[str, float]:
        if self.critic is None:
            return self.actor.train(shards)
        values = self.critic.rank.values(shards[0])
        experience, targets = self.actor.rank.experience(shards[0], values)
        return {**self.actor.train(shards, experience), **self.critic.train(shards, targets)}

    def casualties(self) -> Mapping[str, str]:
        return {}

    def asleep(self) -> bool:
        return any(gang.rank.view().state == "asleep" for gang in self.all)

    def sleep(self) -> None:
        for gang in self.all:
            gang.rank.sleep()

    def wake(self) -> None:
        for gang in self.all:
            gang.rank.wake()


class FromRank:
    """Stands for a transport: reads the tensors of the rank where they are."""

    def __init__(self, rank: MegatronRank) -> None:
        self._rank = rank

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        pieces = list(self._rank._weights.pieces())
        for spec in plan.tensors:
            whole = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
            for piece in pieces:
                if piece.name == spec.name:
                    region = piece.region
                    box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
                    whole[box] = piece.tensor.detach()
            sink(TensorSpec(spec.name, spec.dtype, spec.shape), whole)
        return plan.nbytes

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Pending:
    """A rollout that was generated when it was asked for."""

    rollout_id: int
    refs: RolloutRefs

    def wait(self) -> RolloutRefs:
        return self.refs


class Engines:
    """The one engine, as rollouts need it; `requests` counts those it answered."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.requests = 0

    def serving(self, weights: WeightId) -> Sequence[str]:
        return ["engine"] if self._engine.view().weights == weights else []

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        self.requests += len(requests)
        return self._engine.generate(requests, sampling, expected)


class Manager:
    """`ManagerClient` in this process."""

    def __init__(self, config: Config, engines: Engines, plan: ResumePlan, run_dir: Path) -> None:
        state = None
        if plan.load_data:
            assert plan.path is not None
            assert plan.iteration is not None
            state = checkpoints.read_data(checkpoints.iteration_dir(plan.path, plan.iteration))
        samples = run_dir / "samples.jsonl"
        self._desk = RolloutDesk(config, engines, samples, plan.start_rollout_id, state, put=lambda shard: shard)
        self._loop = asyncio.new_event_loop()  # one, as the manager's actor has

    def generate(self, rollout_id: int, weights: WeightId) -> Pending:
        return Pending(rollout_id, self._loop.run_until_complete(self._desk.generate(rollout_id, weights)))

    def evaluate(self, rollout_id: int, weights: WeightId) -> Mapping[str, Any]:
        return self._loop.run_until_complete(self._desk.evaluate(rollout_id, weights))

    def dead_engines(self) -> tuple[str, ...]:
        return ()

    def mark_trained(self, rollout_id: int) -> None:
        self._desk.mark_trained(rollout_id)

    def hold(self) -> None:
        self._desk.hold()

    def serve(self, weights: WeightId) -> None:
        """Whatever may be generated by these weights is, before anything else happens."""
        self._loop.run_until_complete(self._served(weights))

    async def _served(self, weights: WeightId) -> None:
        self._desk.serve(weights)
        while self._desk.data_state().get("unfinished"):
            await asyncio.sleep(0)

    def data_state(self) -> dict[str, Any]:
        return self._desk.data_state()


@dataclass(frozen=True)
class Publisher:
    """`publish.Publisher` with the same proof, and no transport."""

    gang: Gang
    engine: EmbeddedEngine
    manager: Manager

    def publish(self, publish_id: str) -> Published:
        quorum = self.gang.agree(publish_id)
        self.manager.hold()
        self.gang.rank.begin_publish(quorum)
        manifest = Manifest(quorum.run, publish_id, quorum.slot, quorum.weights, quorum.tensors)
        self.engine.pause()
        self.engine.flush()
        self.engine.begin_update(manifest)
        nbytes = self.engine.receive(plan_send(quorum.holders, quorum.tensors, 1 << 30), Rendezvous(("engine",), ()))
        assert mismatches(manifest.tensors, self.engine.prove().tensors) == ()
        self.engine.commit(manifest)
        self.engine.resume()
        self.manager.serve(quorum.weights)
        self.gang.rank.end_publish(None)
        return Published(quorum.weights, quorum.digest, ("engine",), nbytes, 0.0, 0.0)


class Watched(LiveRun):
    """A run that tells of each save before it begins and when it is done."""

    before_save: Callable[[int], None]
    after_save: Callable[[int], None]

    def save(self, rollout_id: int) -> None:
        self.before_save(rollout_id)
        super().save(rollout_id)
        self.after_save(rollout_id)


@dataclass(frozen=True)
class Outcome:
    """What one process of a run did. `steps` is `metrics.jsonl` as it stood when it ended."""

    plan: ResumePlan
    trained: list[Trained]
    steps: list[dict[str, Any]]
    requests: int
    jumps: list[str] | None
    """What was found to differ from what was saved; None where nothing was resumed."""


@contextmanager
def joined(gang: Gang) -> Iterator[None]:
    """Inside, whoever joins a gang is in that of `gang`: its process groups are there already, and of one rank."""
    original, worker.initialise = worker.initialise, lambda *_: gang.rank._place
    try:
        yield
    finally:
        worker.initialise = original


def go(
    run_dir: Path,
    changes: Mapping[str, Any],
    *,
    before_save: Callable[[int], None] = lambda rollout_id: None,
    after_save: Callable[[int], None] = lambda rollout_id: None,
    sabotage: Callable[[WorkerSpec], WorkerSpec] = lambda spec: spec,
) -> Outcome:
    """Run, or continue, to the end. Everything that a process holds is made anew and given up."""
    torch.set_num_threads(1)
    config = configuration(run_dir, changes)
    plan = resuming.plan(config)
    directory = RunDir.open(config, plan)
    steps = JsonlTracker(directory.path / "metrics.jsonl", plan.start_rollout_id)
    evals = JsonlTracker(directory.path / "eval.jsonl", plan.start_rollout_id)
    gang_id = GangId(1, directory.incarnation, config_hash(config))
    told = (config, plan, gang_id, str(directory.path), "127.0.0.1")
    gang = Gang(sabotage(worker_specs(*told)[0]))
    try:
        critic = None
        if config.algorithm.needs_critic:
            with joined(gang):
                critic = Gang(sabotage(critic_specs(*told)[0]))
        directory.gang_started(gang_id, plan)
        engine = EmbeddedEngine("engine", config.model, FromRank(gang.rank))
        engines = Engines(engine)
        manager: Any = Manager(config, engines, plan, directory.path)
        publisher: Any = Publisher(gang, engine, manager)
        anyone: Any = Gangs(gang, critic)
        run = Watched(
            config, directory, anyone, manager, publisher, steps, evals, Stop(0.0), continuity.expected(config, plan)
        )
        run.before_save, run.after_save = before_save, after_save
        train_loop(run, config, plan.start_rollout_id)
    finally:
        steps.close()
        evals.close()
        parallel.shutdown()
    compared = [e for e in journal(run_dir, "driver", "continuity") if e["incarnation"] == directory.incarnation]
    jumps = compared[0]["jumps"] if compared else None
    return Outcome(plan, gang.trained, lines(directory.path / "metrics.jsonl"), engines.requests, jumps)
