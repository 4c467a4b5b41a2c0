"""The transport over shared memory, for engines on the leader's own machine: on GPUs the leader's device memory, opened
by the engine through CUDA IPC; on CPUs a shared memory file. Nothing is copied on the way but what the engine keeps.

The leader fills one buffer with bucket after bucket. A store says when a bucket is ready and who has taken it; what
travels through it are handles made of plain values, never pickles.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from state.gang import ActorPermit
from state.store import LiveWeights
from workers.weights.assembly import Assembly
from workers.weights.base import Sink, TransportError
from workers.weights.buckets import views
from workers.weights.process_group import Device, connect, listen
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, Stream


class IpcSender:
    """The sending side in one trainer rank. `peers` is the trainers' group, None for the default one."""

    def __init__(
        self, rank: int, *, host: str, device: Device, timeout_s: float, peers: ProcessGroup | None = None
    ) -> None:
        self._rank, self._host, self._device = rank, host, device
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

    def _lead(self, permit: ActorPermit, stream: Stream, assembly: Assembly) -> None:
        if self._server is None or self._endpoint is None:
            raise TransportError(f"trainer rank {self._rank} leads a stream but was never asked to listen")
        store, largest = PrefixStore(self._endpoint.token, self._server), _largest(stream)
        buffer = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        if self._device == "cpu":
            buffer = torch.empty(0, dtype=torch.uint8).set_(UntypedStorage._new_using_filename_cpu(largest))
        store.set("buffer", _export(buffer))
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
        store = PrefixStore(endpoint.token, connect(endpoint, self._timeout_s, self._engine_id))
        leader = f"trainer rank {endpoint.leader}"
        self._wait(store, "buffer", f"{leader} to share its buffer")
        buffer = _import(store.get("buffer"))
        if buffer.numel() < _largest(stream):
            raise TransportError(f"{leader} shares {buffer.numel()} bytes, the plan needs {_largest(stream)}")
        for number, bucket in enumerate(stream.buckets):
            self._wait(store, f"{number}/ready", f"bucket {number + 1} of {len(stream.buckets)} of {leader}")
            for spec, tensor in views(bucket, buffer):
                if problems:
                    break
                try:
                    sink(spec, tensor)
                except Exception as error:
                    problems.append(error)
            _finish_device(self._device)
            store.set(f"{number}/{self._engine_id}", "")

    def _wait(self, store: PrefixStore, key: str, what: str) -> None:
        try:
            store.wait([key], timedelta(seconds=self._timeout_s))
        except dist.DistError as error:
            raise TransportError(f"{self._engine_id} waited {self._timeout_s:g} s for {what}") from error


def _largest(stream: Stream) -> int:
    return max((bucket.nbytes for bucket in stream.buckets), default=0)


def _finish_device(device: Device) -> None:
    """What was queued on the device is done: the other side does not wait for our streams."""
    if device == "cuda":
        torch.cuda.synchronize()


def _export(buffer: Tensor) -> str:
    """A handle of the buffer's memory that another process of this machine can open."""
    storage = buffer.untyped_storage()
    share: Callable[[], tuple[Any, ...]] = storage._share_cuda_ if buffer.is_cuda else storage._share_filename_cpu_
    parts = share()
    return json.dumps({"device": buffer.device.type, "size": buffer.numel(), "parts": [_plain(part) for part in parts]})


def _import(handle: bytes) -> Tensor:
    told: dict[str, Any] = json.loads(handle)
    parts = [_unplain(part) for part in told["parts"]]
    if told["device"] == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = UntypedStorage._new_shared_cuda(*parts)
    else:
        storage = UntypedStorage._new_shared_filename_cpu(*parts)
    return torch.empty(0, dtype=torch.uint8, device=told["device"]).set_(storage)[: told["size"]]


def _plain(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _unplain(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
