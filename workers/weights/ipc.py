"""The transport over shared memory, for engines on the leader's own machine: on GPUs the leader's device memory, opened
by the engine through CUDA IPC; on CPUs a shared memory file. Nothing is copied on the way but what the engine keeps.

The leader fills one buffer with bucket after bucket. A store says when a bucket is ready and who has taken it; what
travels through it are handles made of plain values, never pickles.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

from state.gang import ActorPermit
from workers.device import Device
from workers.weights.assembly import Assembly
from workers.weights.base import Sink
from workers.weights.buckets import Bucket
from workers.weights.errors import TransportError
from workers.weights.leading import StoreSender
from workers.weights.process_group import connect
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, Stream
from workers.weights.shared_memory import allocate, export_buffer, import_buffer, size_of
from workers.weights.views import views


class IpcSender(StoreSender):
    """The sending side in one trainer rank. `peers` is the trainers' group, None for the default one."""

    def __init__(
        self, rank: int, *, host: str, device: Device, timeout_s: float, peers: ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, host=host, timeout_s=timeout_s, peers=peers)
        self._device = device

    def _lead(self, permit: ActorPermit, stream: Stream, assembly: Assembly) -> None:
        (store, _), largest = self._opened(), _largest(stream)
        buffer = allocate(largest, self._device)
        store.set("buffer", export_buffer(buffer))
        for number, bucket in enumerate(stream.buckets):
            permit.require("publish")
            assembly.fill(stream, bucket, buffer)
            _finish_device(self._device)
            store.set(f"{number}/ready", "")
            self._wait_for_takers(store, number, len(stream.buckets))

    def _wait_for_takers(self, store: PrefixStore, number: int, of: int) -> None:
        keys = [f"{number}/{engine}" for engine in self._engines]
        try:
            store.wait(keys, timedelta(seconds=self._timeout_s))
        except dist.DistError as error:
            late = [engine for engine, key in zip(self._engines, keys, strict=True) if not store.check([key])]
            raise TransportError(
                f"trainer rank {self._rank} waited {self._timeout_s:g} s for {', '.join(late)} to take bucket "
                f"{number + 1} of {of}"
            ) from error


class IpcReceiver:
    """The receiving side in one engine."""

    def __init__(self, engine_id: str, *, device: Device, timeout_s: float) -> None:
        self._engine_id, self._device, self._timeout_s = engine_id, device, timeout_s

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        if self._engine_id not in rendezvous.engines:
            raise TransportError(f"{self._engine_id} is not among the engines to send to: {rendezvous.engines}")
        problems: list[Exception] = []
        for stream in plan.streams:
            self._take(stream, rendezvous.endpoint(stream.leader), sink, problems)
        if problems:
            raise problems[0]
        return plan.nbytes

    def close(self) -> None:
        return

    def _take(self, stream: Stream, endpoint: Endpoint, sink: Sink, problems: list[Exception]) -> None:
        opened: Tensor | None = None
        for buffer, bucket in shared_buckets(stream, endpoint, self._engine_id, timeout_s=self._timeout_s):
            opened = import_buffer(buffer) if opened is None else opened
            for spec, tensor in views(bucket, opened):
                if problems:
                    break
                try:
                    sink(spec, tensor)
                except Exception as error:
                    problems.append(error)
            _finish_device(self._device)


def shared_buckets(
    stream: Stream, endpoint: Endpoint, engine_id: str, *, timeout_s: float
) -> Iterator[tuple[str, Bucket]]:
    """Each bucket of one leader when it is there, with the handle of the buffer that it is in. Asking for the next
    tells the leader that this one was taken."""
    store = PrefixStore(endpoint.token, connect(endpoint, timeout_s, engine_id))
    leader = f"trainer rank {endpoint.leader}"

    def wait(key: str, what: str) -> None:
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistError as error:
            raise TransportError(f"{engine_id} waited {timeout_s:g} s for {what}") from error

    wait("buffer", f"{leader} to share its buffer")
    buffer = store.get("buffer").decode()
    if size_of(buffer) < _largest(stream):
        raise TransportError(f"{leader} shares {size_of(buffer)} bytes, the plan needs {_largest(stream)}")
    for number, bucket in enumerate(stream.buckets):
        wait(f"{number}/ready", f"bucket {number + 1} of {len(stream.buckets)} of {leader}")
        yield buffer, bucket
        store.set(f"{number}/{engine_id}", "")


def _largest(stream: Stream) -> int:
    return max((bucket.nbytes for bucket in stream.buckets), default=0)


def _finish_device(device: Device) -> None:
    """What was queued on the device is done: the other side does not wait for our streams."""
    if device == "cuda":
        torch.cuda.synchronize()
