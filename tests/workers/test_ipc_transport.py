"""Shared memory as a transport: what becomes of a transfer when a side is missing, or asks for what is not agreed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from state.gang import ActorPermit, PermitVoid
from tests.workers.test_distributed_transport import ENGINES, LOOPBACK, Held, held_by_rank_0, permit, plan_of
from workers.weights.errors import TransportError
from workers.weights.ipc import IpcReceiver, IpcSender
from workers.weights.rendezvous import Endpoint, Rendezvous


class Transfer:
    """A leader and two engines, as threads of this process."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.holders, self.weights = held_by_rank_0()
        self.plan = plan_of(self.holders, bucket_bytes=64)
        self.sender = IpcSender(0, host=LOOPBACK, device="cpu", timeout_s=timeout_s)
        self.receivers = {e: IpcReceiver(e, device="cpu", timeout_s=timeout_s) for e in ENGINES}
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


def test_both_engines_hold_everything() -> None:
    transfer = Transfer()
    assert {f.result() for f in transfer.run().values()} == {transfer.plan.nbytes}
    for held in transfer.held.values():
        held.check()


def test_an_engine_that_does_not_come_is_named() -> None:
    with pytest.raises(TransportError, match="run/engine/1 to take bucket 1"):
        Transfer(timeout_s=0.5).run(present=ENGINES[:1])["leader"].result()


def test_a_leader_that_does_not_come_is_named() -> None:
    transfer = Transfer(timeout_s=0.5)
    endpoint = transfer.sender.listen(transfer.plan, ENGINES)
    assert endpoint is not None
    with pytest.raises(TransportError, match="trainer rank 0 to share its buffer"):
        transfer.receivers[ENGINES[0]].receive(transfer.plan, Rendezvous(ENGINES, (endpoint,)), Held().sink)


def test_nothing_leaves_without_a_valid_permit() -> None:
    ended = permit()
    ended.revoke()
    transfer = Transfer(timeout_s=0.5)
    futures = transfer.run(leave=ended)
    with pytest.raises(PermitVoid):
        futures["leader"].result()
    assert not any(transfer.held.values())


def test_a_sink_that_fails_does_not_hold_up_the_others() -> None:
    transfer = Transfer()
    transfer.held[ENGINES[0]].update(held_already=None)  # type: ignore[arg-type]
    transfer.held[ENGINES[0]].sink = lambda spec, tensor: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    futures = transfer.run()
    assert futures["leader"].result() == transfer.plan.nbytes
    with pytest.raises(ZeroDivisionError):
        futures[ENGINES[0]].result()
    transfer.held[ENGINES[1]].check()


def test_it_must_have_been_asked_to_listen() -> None:
    transfer = Transfer()
    with pytest.raises(TransportError, match="never asked to listen"):
        transfer.sender.send(permit(), transfer.plan, transfer.weights)


def test_an_engine_that_is_not_expected_is_refused() -> None:
    transfer = Transfer()
    meeting = Rendezvous(ENGINES, (Endpoint(0, LOOPBACK, 1, "t"),))
    with pytest.raises(TransportError, match="is not among the engines"):
        IpcReceiver("run/engine/7", device="cpu", timeout_s=1).receive(transfer.plan, meeting, Held().sink)
