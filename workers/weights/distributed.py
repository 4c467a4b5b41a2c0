"""The transport over process groups: each leader broadcasts its stream of buckets to the engines.

The engines are in no group of the trainers. Pieces that other ranks hold reach the leader point to point in the
trainers' own group. Everyone works through streams, buckets and tensors in the plan's order.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore

from state.digest import Region, dtype_name
from state.gang import ActorPermit
from state.store import LiveWeights
from workers.weights.base import Sink, TransportError
from workers.weights.buckets import Bucket, views
from workers.weights.process_group import BroadcastGroup, Device, connect, listen
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, Stream

_Pieces = Mapping[tuple[str, Region], Tensor]


class DistributedSender:
    """The sending side in one trainer rank. Its group lives until the engines change or a transfer fails.

    `host` is an address of this node that the engines reach; loopback when the cluster is one machine. `peers` is the
    trainers' group, None for the default one.
    """

    def __init__(
        self, rank: int, *, host: str, device: Device, timeout_s: float, peers: ProcessGroup | None = None
    ) -> None:
        self._rank, self._host, self._device = rank, host, device
        self._timeout_s, self._peers = timeout_s, peers
        self._engines: tuple[str, ...] = ()
        self._store: TCPStore | None = None
        self._endpoint: Endpoint | None = None
        self._group: BroadcastGroup | None = None

    def listen(self, plan: SendPlan, engines: tuple[str, ...]) -> Endpoint | None:
        if self._rank not in plan.leaders:
            return None
        if self._endpoint is None or engines != self._engines:
            self.close()
            self._store, port = listen(self._host, self._timeout_s)
            self._endpoint = Endpoint(self._rank, self._host, port, uuid.uuid4().hex)
            self._engines = engines
        return self._endpoint

    def send(self, permit: ActorPermit, plan: SendPlan, weights: LiveWeights) -> int:
        permit.require("publish")
        try:
            pieces = {(piece.name, piece.region): piece.tensor.detach() for piece in weights.pieces()}
            _check_pieces(self._rank, plan, pieces)
            if self._rank in plan.leaders:
                self._join()
            sent = sum(self._send_stream(permit, stream, pieces) for stream in plan.streams)
            if self._device == "cuda":
                torch.cuda.synchronize()
            return sent
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the group; the next `listen` starts another."""
        if self._group is not None:
            self._group.close()
        self._group, self._endpoint, self._store, self._engines = None, None, None, ()

    def _join(self) -> None:
        if self._group is not None:
            return
        if self._store is None or self._endpoint is None:
            raise TransportError(f"trainer rank {self._rank} leads a stream but was never asked to listen")
        self._group = BroadcastGroup(
            self._store,
            self._endpoint.token,
            0,
            (f"trainer rank {self._rank}", *self._engines),
            host=self._host,
            device=self._device,
            timeout_s=self._timeout_s,
        )

    def _send_stream(self, permit: ActorPermit, stream: Stream, pieces: _Pieces) -> int:
        leads = stream.leader == self._rank
        largest = max((bucket.nbytes for bucket in stream.buckets), default=0)
        buffer = torch.zeros(largest if leads else 0, dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(stream.buckets):
            permit.require("publish")
            if not leads:
                self._give(stream, bucket, pieces)
                continue
            self._assemble(stream, bucket, pieces, buffer)
            assert self._group is not None
            what = f"bucket {number + 1} of {len(stream.buckets)}"
            self._group.broadcast(buffer[: bucket.nbytes], what)
        return stream.nbytes if leads else 0

    def _assemble(self, stream: Stream, bucket: Bucket, pieces: _Pieces, buffer: Tensor) -> None:
        for spec, whole in views(bucket, buffer):
            for rank, region in stream.holders[spec.name]:
                part = whole[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]
                if rank == self._rank:
                    part.copy_(pieces[spec.name, region])
                elif region.numel:
                    arrived = torch.empty(region.shape, dtype=whole.dtype, device=whole.device)
                    work = dist.irecv(_bytes(arrived), src=rank, group=self._peers)
                    self._finish(work, f"a piece of {spec.name} from trainer rank {rank}")
                    part.copy_(arrived)

    def _give(self, stream: Stream, bucket: Bucket, pieces: _Pieces) -> None:
        for entry in bucket.entries:
            for rank, region in stream.holders[entry.tensor.name]:
                if rank == self._rank and region.numel:
                    piece = _bytes(pieces[entry.tensor.name, region])
                    work = dist.isend(piece, dst=stream.leader, group=self._peers)
                    self._finish(work, f"trainer rank {stream.leader} to take its piece of {entry.tensor.name}")

    def _finish(self, work: dist.Work | None, what: str) -> None:
        if work is None:
            raise TransportError(f"trainer rank {self._rank} is not in the group that pieces travel in")
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"trainer rank {self._rank} waited up to {self._timeout_s:g} s for {what}: {error}"
            ) from error


class DistributedReceiver:
    """The receiving side in one engine. Its groups live until the leaders open others."""

    def __init__(self, engine_id: str, *, device: Device, timeout_s: float) -> None:
        self._engine_id, self._device, self._timeout_s = engine_id, device, timeout_s
        self._groups: dict[Endpoint, BroadcastGroup] = {}

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        if self._engine_id not in rendezvous.engines:
            raise TransportError(f"{self._engine_id} is not among the engines to send to: {rendezvous.engines}")
        try:
            endpoints = [rendezvous.endpoint(leader) for leader in plan.leaders]
            for former in self._groups.keys() - set(endpoints):
                self._groups.pop(former).close()
            for endpoint in endpoints:
                if endpoint not in self._groups:
                    self._groups[endpoint] = self._join(endpoint, rendezvous.engines)
            problems: list[Exception] = []
            for stream, endpoint in zip(plan.streams, endpoints, strict=True):
                self._receive_stream(stream, self._groups[endpoint], sink, problems)
            if self._device == "cuda":
                torch.cuda.synchronize()
        except BaseException:
            self.close()
            raise
        if problems:
            raise problems[0]
        return plan.nbytes

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _join(self, endpoint: Endpoint, engines: tuple[str, ...]) -> BroadcastGroup:
        return BroadcastGroup(
            connect(endpoint, self._timeout_s, self._engine_id),
            endpoint.token,
            1 + engines.index(self._engine_id),
            (f"trainer rank {endpoint.leader}", *engines),
            host=endpoint.host,
            device=self._device,
            timeout_s=self._timeout_s,
        )

    def _receive_stream(self, stream: Stream, group: BroadcastGroup, sink: Sink, problems: list[Exception]) -> None:
        largest = max((bucket.nbytes for bucket in stream.buckets), default=0)
        buffer = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(stream.buckets):
            group.broadcast(buffer[: bucket.nbytes], f"bucket {number + 1} of {len(stream.buckets)}")
            for spec, tensor in views(bucket, buffer):
                if problems:
                    break
                try:
                    sink(spec, tensor)
                except Exception as error:
                    problems.append(error)


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor as flat uint8, which every backend moves, whatever the dtype; a copy unless it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def _check_pieces(rank: int, plan: SendPlan, pieces: _Pieces) -> None:
    """That this rank holds what the plan says it holds, before anyone waits for it."""
    for stream in plan.streams:
        dtypes = {e.tensor.name: e.tensor.dtype for bucket in stream.buckets for e in bucket.entries}
        for name, holders in stream.holders.items():
            for holder, region in holders:
                if holder != rank:
                    continue
                piece = pieces.get((name, region))
                if piece is None:
                    raise ValueError(f"trainer rank {rank} was to send {region} of {name}, which it does not hold")
                if dtype_name(piece.dtype) != dtypes[name]:
                    raise ValueError(f"trainer rank {rank} holds {name} as {piece.dtype}, not as {dtypes[name]}")
