"""A real rank in the real loop, with engines that answer what the published weights said when they were published."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.loops import train_loop
from state.journal import Journal
from state.resume import LoadSpec, ResumePlan
from state.slots import WeightId
from tests.workers.gang_processes import Place
from tests.workers.rank_jobs import SLOTS, Setting, agreed, rank_of
from tests.workers.train_jobs import make_samples, totals_of
from workers.batch import Sample, StepShard, TrainShard
from workers.config import AlgorithmConfig
from workers.megatron.cpu import redirect
from workers.megatron.worker import MegatronRank

SCHEDULES = tuple(product(("sync", "async"), (1, 2, 3)))
ROLLOUTS = 4
GAP = "rollout/train_engine_logprob_diff_max"


@dataclass(frozen=True)
class Told:
    """By rollout: how far the behaviour policy's log-probs are from the engine's, and those of the actor that is
    trained."""

    gaps: list[float]
    moved: list[float]


@dataclass
class Loop:
    """The verbs of `loops.Run` that a schedule needs; the driver's journal beside them."""

    rank: MegatronRank
    driver: Journal
    rollouts: range = range(0)
    version: int = 0
    publishes: int = 0
    served: dict[int, list[Sample]] = field(default_factory=dict)
    told: Told = field(default_factory=lambda: Told([], []))

    def confirm_resume(self) -> None: ...

    def may_stop(self) -> None: ...

    def finish_saves(self) -> None: ...

    def report(self, rollout_id: int) -> None: ...

    def wait(self, rollout: Any) -> None: ...

    def publish(self) -> None:
        """What engines will say from now on is what these weights say."""
        self.publishes += 1
        quorum = agreed(self.rank, f"p{self.publishes}")
        self.rank.begin_publish(quorum)
        self.rank.end_publish(None)
        self.version = quorum.weights.version
        self.driver.append(
            "publish",
            publish_id=quorum.publish_id,
            outcome="committed",
            slot=quorum.slot,
            incarnation=1,
            version=self.version,
            digest=quorum.digest,
            transitions=quorum.transitions,
            summaries=quorum.summaries,
            engines={},
        )
        self.served = {rollout_id: self._said(rollout_id) for rollout_id in self.rollouts}

    def _said(self, rollout_id: int) -> list[Sample]:
        samples = make_samples(seed=rollout_id)
        scores = self._live(samples)
        about = {"versions": (WeightId(1, self.version),)}
        return [
            replace(s, logprobs=tuple(own.tolist()), reward=float(s.index % 2), **about)  # type: ignore[arg-type]
            for s, own in zip(samples, scores, strict=True)
        ]

    def _live(self, samples: list[Sample]) -> Any:
        with redirect():
            return self.rank._policy.scorer._live(samples)

    def generate(self, rollout_id: int) -> tuple[int, int, list[Sample]]:
        return rollout_id, self.version, self.served[rollout_id]

    def train(self, rollout: tuple[int, int, list[Sample]]) -> None:
        rollout_id, version, samples = rollout
        now = self._live(samples)
        moved = [
            abs(a - b)
            for s, own in zip(samples, now, strict=True)
            for a, b in zip(own.tolist(), s.logprobs, strict=True)
        ]
        totals = totals_of(samples)
        shard = TrainShard(rollout_id, (StepShard(tuple(samples), totals.tokens, totals.sequences),))
        metrics = self.rank.train(shard)
        assert metrics is not None
        self.driver.append("trained", incarnation=1, rollout_id=rollout_id, version=rollout_id + 1, behaviour=[version])
        self.told.gaps.append(metrics[GAP])
        self.told.moved.append(max(moved))


def every_schedule(place: Place, directory: Path) -> dict[str, Told]:
    """One after the other, on one rank that goes on training."""
    setting = Setting(
        directory, slots=SLOTS[:1], algorithm=AlgorithmConfig(old_logprobs="old_actor"), ref_update_interval=None
    )
    driver = Journal(directory / "journal" / "driver.jsonl", "driver")
    driver.append("driver_started", incarnation=1, pid=1, start_rollout_id=None)
    told = {}
    with rank_of(place, setting) as rank:
        plan = ResumePlan("fresh", LoadSpec.random(), 0, False, False, False, "nothing was saved")
        driver.append("gang_started", role="actor", incarnation=1, world_size=1, config_hash="", resume=plan.to_json())
        loop: Any = Loop(rank, driver)
        for number, (mode, interval) in enumerate(SCHEDULES):
            start = number * ROLLOUTS
            loop.rollouts, loop.told = range(start, start + ROLLOUTS), Told([], [])
            sections = {"num_rollout": start + ROLLOUTS, "mode": mode, "update_weights_interval": interval}
            train_loop(loop, Config.model_validate({"loop": sections}), start)
            told[f"{mode}-{interval}"] = loop.told
    driver.append("run_ended", incarnation=1, outcome="done")
    return told
