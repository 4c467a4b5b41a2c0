"""What the ranks of test_background_save.py do."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from state import checkpoints
from tests.workers.gang_processes import Place
from tests.workers.rank_jobs import Setting, _digests, agreed, machine_of, publish, rank_of, shard
from workers.megatron.torch_dist import PrivateCopy
from workers.megatron.worker import MegatronRank


@dataclass(frozen=True)
class Told:
    """What one rank saw. `second` and `other` are what it says of another save, and about one that it does not know."""

    digests: dict[str, str]
    files_while_training: list[str]
    second: str
    other: str
    version: int


@contextmanager
def instead_of_writing(do: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    real = PrivateCopy.write
    PrivateCopy.write = lambda self: do(lambda: real(self))  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrivateCopy.write = real  # type: ignore[method-assign]


def _begin(rank: MegatronRank, root: Path, iteration: int) -> dict[str, str]:
    quorum = agreed(rank, f"save-{iteration}", with_kept=True)
    path = checkpoints.iteration_dir(root, iteration)
    path.mkdir(parents=True, exist_ok=True)
    rank.save(quorum, str(path), background=True)
    return _digests(quorum)


def saves_and_trains_on(place: Place, setting: Setting, root: Path) -> Told:
    go_on = threading.Event()

    def held(write: Callable[[], Any]) -> Any:
        assert go_on.wait(60)
        return write()

    with rank_of(place, setting) as rank, instead_of_writing(held):
        for rollout_id in range(3):
            publish(rank, f"p{rollout_id}")
            rank.train(shard(rank, rollout_id, max(0, rollout_id - 1)))
        digests = _begin(rank, root, 2)
        publish(rank, "p3")
        rank.train(shard(rank, 3, 2))
        files = [str(path) for path in root.rglob("*.distcp")]
        second = _said(lambda: rank.save(agreed(rank, "second"), str(root), background=True))
        other = _said(lambda: rank.written("save-9"))
        go_on.set()
        mine = rank.written("save-2")
        everyone = [mine] * place.world_size
        dist.all_gather_object(everyone, mine)
        rank.end_save("save-2", everyone)
        dist.barrier()
        return Told(digests, files, second, other, machine_of(rank).record(machine_of(rank).primary).version)


def fails_to_write(place: Place, setting: Setting, root: Path) -> None:
    def full(write: Callable[[], Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with rank_of(place, setting) as rank, instead_of_writing(full):
        publish(rank, "p0")
        rank.train(shard(rank, 0, 0))
        _begin(rank, root, 0)
        rank.written("save-0")


def is_stuck(place: Place, setting: Setting, root: Path) -> None:
    never = threading.Event()
    with rank_of(place, setting) as rank, instead_of_writing(lambda write: never.wait()):
        publish(rank, "p0")
        rank.train(shard(rank, 0, 0))
        _begin(rank, root, 0)
        rank._saver._spec = _impatient(rank)
        rank.written("save-0")


def _impatient(rank: MegatronRank) -> Any:
    return replace(rank._spec, train=rank._spec.train.model_copy(update={"timeout_s": 0.05}))


def _said(do: Callable[[], object]) -> str:
    try:
        do()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
