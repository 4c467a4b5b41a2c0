"""What a run asks for, and what it says when that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import placement
from orchestrator.config import ClusterConfig, Config
from orchestrator.placement import Placement, bundles, explain, roles
from orchestrator.train_group import data_parallel_rank
from orchestrator.waiting import WorkerFailed
from workers.config import AlgorithmConfig, RolloutConfig, TrainConfig


def test_one_bundle_for_each_rank_then_for_each_engine() -> None:
    config = Config(
        train=TrainConfig(num_workers=2, cpus_per_worker=1.0, gpus_per_worker=1.0),
        rollout=RolloutConfig(num_engines=1, cpus_per_engine=0.5),
    )
    assert bundles(config) == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.5}]


def test_a_critic_has_as_many_bundles_behind_the_actors_and_before_the_engines() -> None:
    config = Config(
        train=TrainConfig(num_workers=2, gpus_per_worker=1.0),
        rollout=RolloutConfig(num_engines=1, cpus_per_engine=0.5),
        algorithm=AlgorithmConfig(advantage_estimator="ppo"),
    )
    asked = bundles(config)
    assert asked == [{"CPU": 1.0, "GPU": 1.0}] * 4 + [{"CPU": 0.5}]
    group: Any = None
    made = Placement(group, roles(config), 2, 1)
    taken = [made.worker_bundle(role, rank) for role in ("actor", "critic") for rank in range(2)]
    assert [*taken, made.engine_bundle(0)] == list(range(len(asked)))


def test_it_says_what_is_asked_what_there_is_and_what_is_free() -> None:
    said = explain([{"CPU": 1.0, "GPU": 1.0}] * 4, {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}, {"CPU": 3.0})
    assert said == "asked CPU 4 GPU 4; the cluster has CPU 8 GPU 2; free now CPU 3 GPU 0"


def test_ranks_of_one_replica_train_on_the_same_shard() -> None:
    train = TrainConfig(num_workers=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [data_parallel_rank(rank, train) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """Has room after so many seconds."""

    def __init__(self, clock: Clock, ready_at: float) -> None:
        self.clock, self.ready_at = clock, ready_at

    def wait(self, seconds: int) -> bool:
        self.clock.now += seconds
        return self.clock.now >= self.ready_at


@pytest.mark.parametrize(("limit", "ready_at", "told"), [(300.0, 5.0, []), (50.0, 45.0, [20, 40]), (5.0, 6.0, [])])
def test_while_there_is_no_room_it_is_explained_within_30_s_and_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, limit: float, ready_at: float, told: list[int]
) -> None:
    clock, said = Clock(), list[str]()
    monkeypatch.setattr(placement, "time", clock)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {"CPU": 1.0})
    group: Any = Group(clock, ready_at)
    config = Config(cluster=ClusterConfig(placement_timeout_s=limit), train=TrainConfig(num_workers=4))
    waiting = Placement(group, ("actor",), 4, 1)
    if ready_at <= limit:
        waiting.wait(config, said.append)
    else:
        with pytest.raises(
            WorkerFailed, match=r"no room .* asked CPU 5; the cluster has CPU 2; free now CPU 1\. Lower"
        ):
            waiting.wait(config, said.append)
        assert clock.now == limit
    explained = "asked CPU 5; the cluster has CPU 2; free now CPU 1"
    assert said == [f"waiting for room, {at} of {limit:g} s: {explained}" for at in told]
