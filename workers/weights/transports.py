"""The transports by name: one sender for each trainer rank, one receiver for each engine."""

from __future__ import annotations

from typing import Literal

from torch.distributed import ProcessGroup

from workers.device import Device
from workers.weights.base import Receiver, Sender
from workers.weights.disk import DiskReceiver, DiskSender
from workers.weights.distributed import DistributedReceiver, DistributedSender
from workers.weights.ipc import IpcReceiver, IpcSender

Transport = Literal["distributed", "ipc", "disk"]


def sender(
    transport: Transport,
    rank: int,
    *,
    host: str,
    device: Device,
    timeout_s: float,
    directory: str | None = None,
    peers: ProcessGroup | None = None,
) -> Sender:
    """`host` is an address of this node that the engines reach; `directory` where `disk` writes; `peers` the trainers'
    group, None for the default."""
    match transport:
        case "distributed":
            return DistributedSender(rank, host=host, device=device, timeout_s=timeout_s, peers=peers)
        case "ipc":
            return IpcSender(rank, host=host, device=device, timeout_s=timeout_s, peers=peers)
        case "disk":
            if directory is None:
                raise ValueError("the transport disk needs a directory: weights.directory")
            return DiskSender(rank, host=host, directory=directory, timeout_s=timeout_s, peers=peers)


def receiver(transport: Transport, engine_id: str, *, device: Device, timeout_s: float) -> Receiver:
    match transport:
        case "distributed":
            return DistributedReceiver(engine_id, device=device, timeout_s=timeout_s)
        case "ipc":
            return IpcReceiver(engine_id, device=device, timeout_s=timeout_s)
        case "disk":
            return DiskReceiver(engine_id, timeout_s=timeout_s)
