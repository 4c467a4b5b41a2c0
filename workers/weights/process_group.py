"""A process group beside the default one: a leader and the engines it broadcasts to.

The group is named and laid out as torch.distributed lays out a group of that name, so that an engine that joins by
torch's own helpers meets the leader all the same.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from workers.device import Device
from workers.weights.errors import TransportError
from workers.weights.rendezvous import Endpoint

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on `host`, on a port that is bound before anyone hears of it."""
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    listener = socket.socket(infos[0][0], socket.SOCK_STREAM)
    listener.bind(infos[0][4])
    listener.listen()
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect(endpoint: Endpoint, timeout_s: float, who: str) -> TCPStore:
    """The store of a leader, from an engine."""
    limit = timedelta(seconds=timeout_s)
    try:
        return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(f"{who} could not reach the leader's store at {endpoint.address}: {error}") from error


class BroadcastGroup:
    """Rank 0 of `members` (names, for messages) broadcasts to all others."""

    def __init__(
        self, store: Store, name: str, rank: int, members: Sequence[str], *, host: str, device: Device, timeout_s: float
    ) -> None:
        self._name, self._rank, self._members = name, rank, tuple(members)
        self._timeout = timedelta(seconds=timeout_s)
        self._arrivals = PrefixStore(f"{name}/arrivals", store)
        base = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        try:
            self._arrivals.set(members[rank], "here")
            self._group = self._make(base, host, device)
        except RuntimeError as error:
            raise TransportError(
                f"{members[rank]} waited up to {timeout_s:g} s for {self._absent()} to join group {name}: {error}"
            ) from error

    def _make(self, store: Store, host: str, device: Device) -> Any:
        """A backend of torch.distributed; its type stubs leave out collectives and options."""
        size = len(self._members)
        if device == "cuda":
            from torch.distributed import ProcessGroupNCCL  # builds of torch without CUDA have none

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            return ProcessGroupNCCL(store, self._rank, size, nccl)
        if host not in _LOOPBACK:
            return ProcessGroupGloo(store, self._rank, size, timeout=self._timeout)
        backend: Any = ProcessGroupGloo
        gloo = backend._Options()
        gloo._timeout = self._timeout
        gloo._devices = [backend.create_device(hostname=host)]
        return backend(store, self._rank, size, gloo)

    def broadcast(self, buffer: Tensor, what: str) -> None:
        """From rank 0 into `buffer` of everyone; `what` names it in errors."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        try:
            self._group.broadcast([buffer], options).wait(self._timeout)
        except RuntimeError as error:
            peers = "its engines" if self._rank == 0 else self._members[0]
            raise TransportError(
                f"{self._members[self._rank]} waited up to {self._timeout.total_seconds():g} s for {what} "
                f"with {peers}: {error}"
            ) from error

    def _absent(self) -> str:
        absent = [m for m in self._members if not self._has_arrived(m)]
        return ", ".join(absent) if absent else "all members"

    def _has_arrived(self, member: str) -> bool:
        try:
            return self._arrivals.check([member])
        except RuntimeError:
            return False

    def close(self) -> None:
        """Peers that still wait for this member see their connection end."""
        self._group.abort()
