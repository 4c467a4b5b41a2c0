"""The transport over files: each leader writes its stream as safetensors into a directory that the engines read too.

A folder of its own for every transfer. A file gets its name when it is whole, engines hear of the folder when every
file is there, and the folder goes when every engine has read it, or when the transfer came to nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import PrefixStore, ProcessGroup

from state.digest import dtype_name
from state.gang import ActorPermit
from workers.weights.assembly import Assembly
from workers.weights.base import Sink
from workers.weights.buckets import TensorSpec
from workers.weights.errors import TransportError
from workers.weights.leading import StoreSender
from workers.weights.process_group import connect
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, Stream
from workers.weights.views import views

_READY = "ready"


class DiskSender(StoreSender):
    """The sending side in one trainer rank. `directory` is the same for trainers and engines, on every node."""

    def __init__(
        self, rank: int, *, host: str, directory: str, timeout_s: float, peers: ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, host=host, timeout_s=timeout_s, peers=peers)
        self._directory = Path(directory)

    def _lead(self, permit: ActorPermit, stream: Stream, assembly: Assembly) -> None:
        store, token = self._opened()
        folder = self._directory / f"publish-{token}"
        folder.mkdir(parents=True)
        try:
            for number, bucket in enumerate(stream.buckets):
                permit.require("publish")
                buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
                assembly.fill(stream, bucket, buffer)
                _write({spec.name: tensor.clone() for spec, tensor in views(bucket, buffer)}, folder, number)
            permit.require("publish")
            store.set(_READY, str(folder))
            self._wait_for_readers(store)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_readers(self, store: PrefixStore) -> None:
        try:
            store.wait(list(self._engines), timedelta(seconds=self._timeout_s))
        except dist.DistError as error:
            late = [engine for engine in self._engines if not store.check([engine])]
            raise TransportError(
                f"trainer rank {self._rank} waited {self._timeout_s:g} s for {', '.join(late)} to read its files"
            ) from error


class DiskReceiver:
    """The receiving side in one engine."""

    def __init__(self, engine_id: str, *, timeout_s: float) -> None:
        self._engine_id, self._timeout_s = engine_id, timeout_s

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        for stream in plan.streams:
            endpoint = rendezvous.endpoint(stream.leader)
            with announced(endpoint, (self._engine_id,), rendezvous, timeout_s=self._timeout_s) as folder:
                for number, bucket in enumerate(stream.buckets):
                    with safe_open(folder / _name(number), framework="pt") as file:
                        for entry in bucket.entries:
                            tensor = file.get_tensor(entry.tensor.name)
                            _check(entry.tensor, tensor)
                            sink(entry.tensor, tensor)
        return plan.nbytes

    def close(self) -> None:
        return


@contextmanager
def announced(
    endpoint: Endpoint, readers: tuple[str, ...], rendezvous: Rendezvous, *, timeout_s: float
) -> Iterator[Path]:
    """The folder of one leader, once every file is in it. The leader is told at the end that `readers` are through,
    also when reading failed: what is missing then shows in the proof, and the leader need not wait for it."""
    if absent := set(readers) - set(rendezvous.engines):
        raise TransportError(f"{', '.join(sorted(absent))} is not among the engines to send to: {rendezvous.engines}")
    store = PrefixStore(endpoint.token, connect(endpoint, timeout_s, readers[0]))
    try:
        store.wait([_READY], timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise TransportError(
            f"{readers[0]} waited {timeout_s:g} s for trainer rank {endpoint.leader} to write its files"
        ) from error
    try:
        yield Path(store.get(_READY).decode())
    finally:
        for reader in readers:
            store.set(reader, "")


def _write(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    unnamed = folder / f".{number}.partial"
    save_file(tensors, unnamed)
    with unnamed.open("rb") as file:
        os.fsync(file.fileno())
    unnamed.rename(folder / _name(number))


def _name(number: int) -> str:
    return f"bucket-{number:05d}.safetensors"


def _check(expected: TensorSpec, found: torch.Tensor) -> None:
    if (dtype_name(found.dtype), tuple(found.shape)) != (expected.dtype, expected.shape):
        raise TransportError(
            f"{expected.name} was written as {dtype_name(found.dtype)} {list(found.shape)}, "
            f"announced as {expected.dtype} {list(expected.shape)}"
        )
