"""Files as a transport: what an engine may read, and what is left when a side is missing."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from state.gang import ActorPermit, PermitVoid
from tests.workers.test_distributed_transport import ENGINES, LOOPBACK, Held, held_by_rank_0, permit, plan_of
from workers.weights import disk
from workers.weights.disk import DiskReceiver, DiskSender
from workers.weights.errors import TransportError
from workers.weights.rendezvous import Rendezvous


class Transfer:
    """A leader and two engines, as threads of this process."""

    def __init__(self, directory: Path, timeout_s: float = 20.0, bucket_bytes: int = 64) -> None:
        self.directory = directory
        self.holders, self.weights = held_by_rank_0()
        self.plan = plan_of(self.holders, bucket_bytes)
        self.sender = DiskSender(0, host=LOOPBACK, directory=str(directory), timeout_s=timeout_s)
        self.receivers = {e: DiskReceiver(e, timeout_s=timeout_s) for e in ENGINES}
        self.held = {e: Held() for e in ENGINES}

    def run(self, leave: ActorPermit | None = None, present: Iterable[str] = ENGINES) -> dict[str, Future[int]]:
        endpoint = self.sender.listen(self.plan, ENGINES)
        assert endpoint is not None
        meeting = Rendezvous(ENGINES, (endpoint,))
        with ThreadPoolExecutor(3) as pool:
            futures = {
                e: pool.submit(self.receivers[e].receive, self.plan, meeting, self.held[e].sink) for e in present
            }
            futures["leader"] = pool.submit(self.sender.send, leave or permit(), self.plan, self.weights)
        return futures

    def left(self) -> list[str]:
        return [str(p.relative_to(self.directory)) for p in self.directory.rglob("*")]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_both_engines_hold_everything_and_no_file_is_left(tmp_path: Path, bucket_bytes: int) -> None:
    transfer = Transfer(tmp_path, bucket_bytes=bucket_bytes)
    for _ in range(2):
        transfer.held = {e: Held() for e in ENGINES}
        assert {f.result() for f in transfer.run().values()} == {transfer.plan.nbytes}
        for held in transfer.held.values():
            held.check()
        assert transfer.left() == []


def test_an_engine_that_does_not_read_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path, timeout_s=0.5)
    with pytest.raises(TransportError, match=r"waited 0\.5 s for run/engine/1 to read its files"):
        transfer.run(present=ENGINES[:1])["leader"].result()
    assert transfer.left() == []


def test_a_leader_that_dies_while_it_writes_is_heard_of_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file never gets its name, so that no engine opens the first."""
    save, calls = disk.save_file, []

    def dies_in_the_second(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError("no space left")
        save(tensors, path)

    monkeypatch.setattr(disk, "save_file", dies_in_the_second)
    transfer = Transfer(tmp_path, timeout_s=0.5)
    futures = transfer.run()
    with pytest.raises(OSError, match="no space left"):
        futures["leader"].result()
    for engine in ENGINES:
        with pytest.raises(TransportError, match=rf"{engine} waited 0\.5 s for trainer rank 0 to write its files"):
            futures[engine].result()
        assert transfer.held[engine] == {}
    assert transfer.left() == []


def test_nothing_leaves_without_a_valid_permit(tmp_path: Path) -> None:
    ended = permit()
    ended.revoke()
    transfer = Transfer(tmp_path)
    transfer.sender.listen(transfer.plan, ENGINES)
    with pytest.raises(PermitVoid):
        transfer.sender.send(ended, transfer.plan, transfer.weights)
    assert transfer.left() == []
