import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous
from torch.distributed.distributed_c10d import _new_process_group_helper

from state.digest import Piece, digest_tensor
from state.digest_records import Region
from state.gang import ActorPermit, PermitVoid, Quorum, mint_permit
from state.slots import Slot, WeightId
from tests.workers.gang_processes import Place, gloo, run_gang
from workers.weights import transports
from workers.weights.buckets import TensorSpec
from workers.weights.distributed import DistributedReceiver, DistributedSender
from workers.weights.errors import TransportError
from workers.weights.process_group import listen
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import Holders, SendPlan, plan_send
from workers.weights.transports import Transport
from workers.weights.views import views

HERE = "tests.workers.test_distributed_transport"
LOOPBACK = "127.0.0.1"
ENGINES = ("run/engine/0", "run/engine/1")


class Weights:
    """Live weights whose pieces are given."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = list(pieces)

    def tensors(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def pieces(self) -> Iterable[Piece]:
        return self._pieces


def full_tensors() -> dict[str, Tensor]:
    """Every kind that travels: both dtypes of a mixed model, views of views, scalars, and nothing at all."""
    g = torch.Generator().manual_seed(3)
    return {
        "a.rows": torch.randn(6, 5, generator=g),
        "b.columns": torch.randn(4, 6, generator=g).to(torch.bfloat16),
        "c.transposed": torch.randn(3, 7, generator=g).t(),
        "d.bool": torch.randn(9, generator=g) > 0,
        "e.scalar": torch.tensor(2.5),
        "f.empty": torch.zeros(0, 4),
        "g.second": torch.randn(11, generator=g),
    }


def half(tensor: Tensor, dim: int, which: int) -> tuple[Region, Tensor]:
    size = tensor.shape[dim] // 2
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    offset[dim], shape[dim] = which * size, size
    return Region(tuple(tensor.shape), tuple(offset), tuple(shape)), tensor.narrow(dim, which * size, size)


def split_over_two_ranks() -> tuple[Holders, dict[int, Weights]]:
    """Rank 0 leads the first tensors, some of them halves, and rank 1 leads `g.second`."""
    holders: dict[str, tuple[tuple[int, Region], ...]] = {}
    pieces: dict[int, list[Piece]] = {0: [], 1: []}
    for name, tensor in full_tensors().items():
        if name in ("a.rows", "b.columns"):
            parts = [(rank, *half(tensor, int(name == "b.columns"), 1 - rank)) for rank in (1, 0)]
        else:
            parts = [(int(name == "g.second"), Region.whole(tensor.shape), tensor)]
        holders[name] = tuple((rank, region) for rank, region, _ in parts)
        for rank, region, part in parts:
            pieces[rank].append(Piece(name, region, part))
    return holders, {rank: Weights(p) for rank, p in pieces.items()}


def held_by_rank_0() -> tuple[Holders, Weights]:
    tensors = full_tensors()
    whole = {name: Region.whole(t.shape) for name, t in tensors.items()}
    return {n: ((0, r),) for n, r in whole.items()}, Weights(Piece(n, whole[n], t) for n, t in tensors.items())


def plan_of(holders: Holders, bucket_bytes: int) -> SendPlan:
    return plan_send(holders, [digest_tensor(n, t) for n, t in full_tensors().items()], bucket_bytes)


def permit() -> ActorPermit:
    quorum = Quorum("p1", "run", "actor", Slot.ACTOR, WeightId(1, 1), "", (), (), (), {})
    return mint_permit(quorum, "publish")


class Held(dict[str, Tensor]):
    """What an engine holds."""

    def sink(self, spec: TensorSpec, tensor: Tensor) -> None:
        assert spec.name not in self
        self[spec.name] = tensor.clone()

    def check(self) -> None:
        expected = full_tensors()
        assert self.keys() == expected.keys()
        for name, tensor in expected.items():
            assert digest_tensor(name, self[name]) == digest_tensor(name, tensor)


# --- two trainers with a group of their own, two engines outside of it


def publish_over_processes(place: Place, directory: str, transport: Transport) -> list[str]:
    """Ranks 0 and 1 train, the others are engines; meeting points pass through a store as through a driver."""
    board = dist.FileStore(f"{directory}/board", -1)
    board.set_timeout(timedelta(seconds=30))
    holders, weights = split_over_two_ranks()
    rounds = [(1, ENGINES), (64, ENGINES), (1 << 20, ENGINES), (64, ENGINES[1:])]
    tokens = []
    with ExitStack() as stack:
        if place.rank < 2:
            stack.enter_context(gloo(Place(place.rank, 2, f"file://{directory}/trainers")))
            sender = transports.sender(transport, place.rank, host=LOOPBACK, device="cpu", timeout_s=20)
            stack.callback(sender.close)
        else:
            engine = ENGINES[place.rank - 2]
            receiver = transports.receiver(transport, engine, device="cpu", timeout_s=20)
            stack.callback(receiver.close)
        for number, (bucket_bytes, engines) in enumerate(rounds):
            plan = plan_of(holders, bucket_bytes)
            assert plan.leaders == (0, 1)
            if place.rank < 2:
                endpoint = sender.listen(plan, engines)
                assert endpoint is not None
                board.set(f"{number}/{place.rank}", f"{endpoint.port} {endpoint.token}")
                assert sender.send(permit(), plan, weights[place.rank]) == plan.streams[place.rank].nbytes
                tokens.append(endpoint.token)
            elif engine in engines:
                answers = [board.get(f"{number}/{leader}").decode().split() for leader in (0, 1)]
                endpoints = tuple(Endpoint(i, LOOPBACK, int(port), token) for i, (port, token) in enumerate(answers))
                held = Held()
                assert receiver.receive(plan, Rendezvous(engines, endpoints), held.sink) == plan.nbytes
                held.check()
                if isinstance(receiver, DistributedReceiver):
                    assert len(receiver._groups) == len(plan.leaders), "groups of former rounds are left"
        board.set(f"done/{place.rank}", "")
        board.wait([f"done/{rank}" for rank in range(4)])
    return tokens


def test_every_engine_gets_every_tensor_over_shared_memory(tmp_path: Path):
    tokens = run_gang(f"{HERE}:publish_over_processes", 4, (str(tmp_path), "ipc"), time_limit_s=60)
    assert len(set(tokens[0])) == 4, "a transfer was taken for a former one"


def test_every_engine_gets_every_tensor_from_all_leaders_for_any_bucket_size(tmp_path: Path):
    tokens = run_gang(f"{HERE}:publish_over_processes", 4, (str(tmp_path), "distributed"), time_limit_s=60)
    for leader in (0, 1):
        first, second, third, fewer_engines = tokens[leader]
        assert first == second == third
        assert fewer_engines != first


# --- one leader and its engines, as threads of this process


class Transfer:
    """A leader and engines; `run` publishes once and returns what became of each."""

    def __init__(self, engines: Sequence[str] = ENGINES, timeout_s: float = 20, bucket_bytes: int = 64) -> None:
        self.engines = tuple(engines)
        self.holders, self.weights = held_by_rank_0()
        self.plan = plan_of(self.holders, bucket_bytes)
        self.sender = DistributedSender(0, host=LOOPBACK, device="cpu", timeout_s=timeout_s)
        self.receivers = {e: DistributedReceiver(e, device="cpu", timeout_s=timeout_s) for e in engines}
        self.held = {e: Held() for e in engines}
        self.sinks = {e: held.sink for e, held in self.held.items()}

    def run(self, leave: ActorPermit | None = None, absent: Sequence[str] = ()) -> dict[str, Future[int]]:
        endpoint = self.sender.listen(self.plan, self.engines)
        assert endpoint is not None
        meeting = Rendezvous(self.engines, (endpoint,))
        for held in self.held.values():
            held.clear()
        with ThreadPoolExecutor(1 + len(self.engines)) as pool:
            futures = {
                engine: pool.submit(receiver.receive, self.plan, meeting, self.sinks[engine])
                for engine, receiver in self.receivers.items()
                if engine not in absent
            }
            futures["leader"] = pool.submit(self.sender.send, leave or permit(), self.plan, self.weights)
        return futures

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()


@pytest.fixture
def transfer() -> Iterable[Transfer]:
    made = Transfer()
    yield made
    made.close()


def test_a_transfer_delivers_and_counts_its_bytes(transfer: Transfer):
    results = transfer.run()
    assert {f.result() for f in results.values()} == {transfer.plan.nbytes}
    for held in transfer.held.values():
        held.check()


def test_a_publish_without_engines_that_listen_names_them():
    transfer = Transfer(timeout_s=2)
    results = transfer.run(absent=[ENGINES[1]])
    for who in ("leader", ENGINES[0]):
        with pytest.raises(TransportError, match=r"waited up to 2 s for run/engine/1 to join"):
            results[who].result()
    transfer.close()


def test_an_engine_that_cannot_reach_the_leader_says_whom_it_looked_for():
    store, port = listen(LOOPBACK, 1)
    del store
    receiver = DistributedReceiver(ENGINES[0], device="cpu", timeout_s=1)
    plan = plan_of(held_by_rank_0()[0], 64)
    with pytest.raises(
        TransportError, match=rf"run/engine/0 could not reach the leader's store at 127\.0\.0\.1:{port}"
    ):
        receiver.receive(plan, Rendezvous(ENGINES[:1], (Endpoint(0, LOOPBACK, port, "t"),)), Held().sink)


def test_an_engine_that_was_not_invited_takes_no_part():
    receiver = DistributedReceiver("run/engine/7", device="cpu", timeout_s=1)
    with pytest.raises(TransportError, match="run/engine/7 is not among the engines"):
        receiver.receive(plan_of(held_by_rank_0()[0], 64), Rendezvous(ENGINES, ()), Held().sink)


def test_what_one_engine_cannot_store_breaks_nothing_for_the_others(transfer: Transfer):
    def full(spec: TensorSpec, tensor: Tensor) -> None:
        raise ValueError(f"no room for {spec.name}")

    transfer.sinks[ENGINES[0]] = full
    results = transfer.run()
    with pytest.raises(ValueError, match=r"no room for a\.rows"):
        results[ENGINES[0]].result()
    assert results["leader"].result() == results[ENGINES[1]].result() == transfer.plan.nbytes
    transfer.held[ENGINES[1]].check()


class Revoked(ActorPermit):
    """A permit that ends after a number of questions."""

    def __init__(self, questions: int) -> None:
        self._inner, self._left = permit(), questions
        self.quorum, self.purpose = self._inner.quorum, self._inner.purpose

    def require(self, purpose: str) -> None:
        self._left -= 1
        if self._left < 0:
            self._inner.revoke()
        self._inner.require("publish")


def test_a_permit_that_ends_midway_stops_the_leader_and_lets_the_engines_know(transfer: Transfer):
    started = time.monotonic()
    results = transfer.run(Revoked(questions=3))
    with pytest.raises(PermitVoid):
        results["leader"].result()
    for engine in ENGINES:
        with pytest.raises(
            TransportError, match=r"run/engine/. waited up to 20 s for bucket 3 of \d with trainer rank 0"
        ):
            results[engine].result()
        assert list(transfer.held[engine]) != list(full_tensors())
    assert time.monotonic() - started < 10


def test_after_a_failure_the_next_transfer_meets_in_a_new_group(transfer: Transfer):
    before = transfer.sender.listen(transfer.plan, ENGINES)
    transfer.run(Revoked(questions=3))
    after = transfer.sender.listen(transfer.plan, ENGINES)
    assert before is not None
    assert after is not None
    assert after.token != before.token
    results = transfer.run()
    assert {f.result() for f in results.values()} == {transfer.plan.nbytes}
    for held in transfer.held.values():
        held.check()


def test_a_leader_that_sees_an_engine_vanish_does_not_wait_for_ever():
    transfer = Transfer(timeout_s=3, bucket_bytes=1)
    transfer.run()
    transfer.receivers[ENGINES[0]].close()
    results = transfer.run(absent=[ENGINES[0]])
    with pytest.raises(TransportError, match=r"trainer rank 0 waited up to 3 s for bucket 1 of \d with its engines"):
        results["leader"].result()
    transfer.close()


@pytest.mark.parametrize("purpose", ["save", "ended"])
def test_nothing_is_read_or_sent_without_a_permit_to_publish(purpose: str):
    leave = mint_permit(permit().quorum, "save") if purpose == "save" else permit()
    if purpose == "ended":
        leave.revoke()

    class Untouchable(Weights):
        def pieces(self) -> Iterable[Piece]:
            raise AssertionError("the weights were read")

    holders, _ = held_by_rank_0()
    sender = DistributedSender(0, host=LOOPBACK, device="cpu", timeout_s=1)
    with pytest.raises(PermitVoid):
        sender.send(leave, plan_of(holders, 64), Untouchable([]))


def test_a_rank_that_does_not_hold_its_part_of_the_plan_says_so_before_anyone_waits():
    holders, weights = held_by_rank_0()
    plan = plan_of(holders, 64)
    sender = DistributedSender(0, host=LOOPBACK, device="cpu", timeout_s=1)
    lacking = Weights(p for p in weights.pieces() if p.name != "a.rows")
    with pytest.raises(ValueError, match=r"rank 0 was to send .* of a\.rows, which it does not hold"):
        sender.send(permit(), plan, lacking)
    other = Weights(Piece(p.name, p.region, p.tensor.double()) for p in weights.pieces())
    with pytest.raises(ValueError, match=r"rank 0 holds a\.rows as torch\.float64, not as float32"):
        sender.send(permit(), plan, other)


def test_a_leader_that_was_not_asked_to_listen_says_so():
    holders, weights = held_by_rank_0()
    sender = DistributedSender(0, host=LOOPBACK, device="cpu", timeout_s=1)
    with pytest.raises(TransportError, match="rank 0 leads a stream but was never asked to listen"):
        sender.send(permit(), plan_of(holders, 64), weights)


def test_a_rank_that_holds_nothing_does_not_listen_and_is_done_at_once():
    sender = DistributedSender(1, host=LOOPBACK, device="cpu", timeout_s=1)
    plan = plan_of(held_by_rank_0()[0], 64)
    assert sender.listen(plan, ENGINES) is None
    assert sender.send(permit(), plan, Weights([])) == 0


def test_an_engine_may_join_with_the_helpers_of_torch():
    """Servers join an update group by address, port, rank and name, through torch's own construction."""
    transfer = Transfer(engines=ENGINES[:1])
    endpoint = transfer.sender.listen(transfer.plan, ENGINES[:1])
    assert endpoint is not None

    def engine() -> Held:
        store, _, _ = next(rendezvous(f"tcp://{endpoint.host}:{endpoint.port}", 1, 2, timeout=timedelta(seconds=20)))
        group, _ = _new_process_group_helper(
            2,
            1,
            [],
            "gloo",
            PrefixStore(endpoint.token, store),
            group_name=endpoint.token,
            timeout=timedelta(seconds=20),
        )
        held = Held()
        for stream in transfer.plan.streams:
            for bucket in stream.buckets:
                buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
                group.broadcast(buffer, 0).wait()
                for spec, tensor in views(bucket, buffer):
                    held.sink(spec, tensor)
        return held

    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(engine)
        sending = pool.submit(transfer.sender.send, permit(), transfer.plan, transfer.weights)
    sending.result()
    receiving.result().check()
    transfer.close()


def test_addresses_of_every_family_are_written_right():
    assert Endpoint(0, "10.0.0.7", 5, "t").address == "10.0.0.7:5"
    assert Endpoint(0, "fe80::1", 5, "t").address == "[fe80::1]:5"
    with pytest.raises(KeyError, match=r"no endpoint of leader 3; there are those of \[0\]"):
        Rendezvous(ENGINES, (Endpoint(0, "h", 5, "t"),)).endpoint(3)
