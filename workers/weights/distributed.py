"""The transport over process groups: each leader broadcasts its stream of buckets to the engines.

The engines are in no group of the trainers. Pieces that other ranks hold reach the leader point to point in the
trainers' own group. Everyone works through streams, buckets and tensors in the plan's order.
"""

from __future__ import annotations

import uuid

import torch
from torch.distributed import ProcessGroup, TCPStore

from state.gang import ActorPermit
from state.store import LiveWeights
from workers.device import Device
from workers.weights.assembly import Assembly
from workers.weights.base import Sink
from workers.weights.errors import TransportError
from workers.weights.process_group import BroadcastGroup, connect, listen
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, Stream
from workers.weights.views import views


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
            assembly = Assembly(self._rank, plan, weights, timeout_s=self._timeout_s, peers=self._peers)
            if self._rank in plan.leaders:
                self._join()
            sent = sum(self._send_stream(permit, stream, assembly) for stream in plan.streams)
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

    def _send_stream(self, permit: ActorPermit, stream: Stream, assembly: Assembly) -> int:
        leads = stream.leader == self._rank
        largest = max((bucket.nbytes for bucket in stream.buckets), default=0)
        buffer = torch.zeros(largest if leads else 0, dtype=torch.uint8, device=self._device)
        for number, bucket in enumerate(stream.buckets):
            permit.require("publish")
            if not leads:
                assembly.give(stream, bucket)
                continue
            assembly.fill(stream, bucket, buffer)
            assert self._group is not None
            what = f"bucket {number + 1} of {len(stream.buckets)}"
            self._group.broadcast(buffer[: bucket.nbytes], what)
        return stream.nbytes if leads else 0


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
