"""Data-parallel replicas that have become different are found by rank and tensor before any engine is touched."""

from __future__ import annotations

import pytest

from tests.workers.drift_jobs import NAME, Refused
from tests.workers.gang_processes import run_gang
from tests.workers.rank_jobs import SLOTS, Setting
from workers.config import AlgorithmConfig

JOB = "tests.workers.drift_jobs:drifting"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Refused]]:
    plain = Setting(
        tmp_path_factory.mktemp("drift"),
        slots=SLOTS[:1],
        algorithm=AlgorithmConfig(),
        keep_old_actors=0,
        ref_update_interval=None,
    )
    return run_gang(JOB, 2, (plain,))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("memory", ("rank 1 has live bytes", "for actor@1: 1 tensors changed", NAME)),
        ("step", ("the same shard of", NAME, "has different bytes: rank 0:", "rank 1:")),
    ],
)
def test_one_flipped_bit_on_one_replica_is_named_by_rank_and_tensor(
    ranks: list[dict[str, Refused]], how: str, words: tuple[str, ...]
) -> None:
    for rank in ranks:
        (problem,) = rank[how].problems
        for word in words:
            assert word in problem
        assert rank[how].asked == ["reconcile"]  # they were looked for, and nothing else
