"""What senders share that meet their engines at a store of the leader: who listens where, who leads which stream."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod

from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from state.gang import ActorPermit
from state.store import LiveWeights
from workers.weights.assembly import Assembly
from workers.weights.errors import TransportError
from workers.weights.process_group import listen
from workers.weights.rendezvous import Endpoint
from workers.weights.send_plan import SendPlan, Stream


class StoreSender(ABC):
    """The sending side in one trainer rank. `host` is an address of this node that the engines reach, `peers` the
    trainers' group, None for the default one. Every transfer has a token of its own."""

    def __init__(self, rank: int, *, host: str, timeout_s: float, peers: ProcessGroup | None) -> None:
        self._rank, self._host = rank, host
        self._timeout_s, self._peers = timeout_s, peers
        self._engines: tuple[str, ...] = ()
        self._server: TCPStore | None = None
        self._endpoint: Endpoint | None = None

    def listen(self, plan: SendPlan, engines: tuple[str, ...]) -> Endpoint | None:
        if self._rank not in plan.leaders:
            return None
        if self._server is None:
            self._server, self._port = listen(self._host, self._timeout_s)
        self._engines = engines
        self._endpoint = Endpoint(self._rank, self._host, self._port, uuid.uuid4().hex)
        return self._endpoint

    def send(self, permit: ActorPermit, plan: SendPlan, weights: LiveWeights) -> int:
        permit.require("publish")
        assembly = Assembly(self._rank, plan, weights, timeout_s=self._timeout_s, peers=self._peers)
        sent = 0
        for stream in plan.streams:
            if stream.leader == self._rank:
                self._lead(permit, stream, assembly)
                sent += stream.nbytes
                continue
            for bucket in stream.buckets:
                permit.require("publish")
                assembly.give(stream, bucket)
        return sent

    def close(self) -> None:
        self._server, self._endpoint = None, None

    def _opened(self) -> tuple[PrefixStore, str]:
        """The store of the transfer that was listened for, and its token."""
        if self._server is None or self._endpoint is None:
            raise TransportError(f"trainer rank {self._rank} leads a stream but was never asked to listen")
        return PrefixStore(self._endpoint.token, self._server), self._endpoint.token

    @abstractmethod
    def _lead(self, permit: ActorPermit, stream: Stream, assembly: Assembly) -> None:
        """Bring one stream to every engine; the permit is asked again before each bucket."""
