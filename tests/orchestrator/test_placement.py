"""What a run asks for, and what it says when that does not fit."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.placement import bundles, explain
from orchestrator.train_group import data_parallel_rank
from workers.config import RolloutConfig, TrainConfig


def test_one_bundle_for_each_rank_then_for_each_engine() -> None:
    config = Config(
        train=TrainConfig(num_workers=2, cpus_per_worker=1.0, gpus_per_worker=1.0),
        rollout=RolloutConfig(num_engines=1, cpus_per_engine=0.5),
    )
    assert bundles(config) == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.5}]


def test_it_says_what_is_asked_what_there_is_and_what_is_free() -> None:
    said = explain([{"CPU": 1.0, "GPU": 1.0}] * 4, {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}, {"CPU": 3.0})
    assert said == "asked CPU 4 GPU 4; the cluster has CPU 8 GPU 2; free now CPU 3 GPU 0"


def test_ranks_of_one_replica_train_on_the_same_shard() -> None:
    train = TrainConfig(num_workers=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [data_parallel_rank(rank, train) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
