"""The launcher of multi-process tests: results by rank, the first traceback, and an end in any case."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.workers.gang_processes import GangFailed, Place, gloo, run_gang

HERE = "tests.workers.test_gang_processes"


def sum_of_ranks(place: Place, factor: int) -> tuple[int, torch.Tensor]:
    with gloo(place):
        total = torch.tensor([place.rank * factor])
        dist.all_reduce(total)
    return place.rank, total


def fails_on_rank_one(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("rank one is unhappy")
    threading.Event().wait()


def dies(place: Place) -> None:
    os._exit(7)


def hangs(place: Place) -> None:
    threading.Event().wait()


def test_results_come_back_by_rank() -> None:
    results = run_gang(f"{HERE}:sum_of_ranks", 2, (10,))
    assert [rank for rank, _ in results] == [0, 1]
    assert [total.item() for _, total in results] == [10, 10]


def test_the_first_failure_ends_the_gang_and_carries_its_traceback() -> None:
    with pytest.raises(GangFailed, match="rank one is unhappy") as failure:
        run_gang(f"{HERE}:fails_on_rank_one", 2)
    assert failure.value.rank == 1


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(GangFailed, match="exit code 7"):
        run_gang(f"{HERE}:dies", 1)


def test_a_gang_that_hangs_ends_at_its_limit() -> None:
    with pytest.raises(GangFailed, match=r"did not end in time on ranks \[0\]"):
        run_gang(f"{HERE}:hangs", 1, time_limit_s=1.0)
