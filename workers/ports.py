"""Ports that servers bind later, reserved so that no two of ours take the same one.

A reservation is the name of an abstract Unix socket: the kernel gives a name to one process at a time, within the same
network namespace that the ports are in, and takes it back when that process ends, however it ends.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
FIRST, LAST = 20_000, 29_999
"""Below the ephemeral ports, which the kernel hands out to anyone's outgoing connections at any time."""


class PortReservation:
    """Consecutive ports that are this process's until `close`, or its death."""

    def __init__(self, ports: range, names: ExitStack) -> None:
        self.ports = ports
        self._names = names

    @property
    def first(self) -> int:
        return self.ports.start

    def close(self) -> None:
        self._names.close()


def reserve(count: int, *, start_at: int = FIRST) -> PortReservation:
    """`count` consecutive ports that nobody listens on and no other process of ours holds. `OSError` if there are none.

    Somebody else's program can still bind one before the server does: the server then fails, and is started again
    with other ports. `start_at` spreads the search.
    """
    candidates = range(FIRST, LAST + 2 - count)
    offset = (start_at - FIRST) % len(candidates)
    for index in range(len(candidates)):
        first = candidates[(offset + index) % len(candidates)]
        ports = range(first, first + count)
        with ExitStack() as names:
            if all(_take(port, names) for port in ports) and all(_is_free(port) for port in ports):
                return PortReservation(ports, names.pop_all())
    raise OSError(f"no {count} free ports in a row between {FIRST} and {LAST}")


def _take(port: int, names: ExitStack) -> bool:
    name = names.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        name.bind(f"\0slotwise-port-{port}")
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    return all(_binds(family, address, port) for family, address in _families())


def _families() -> Iterator[tuple[int, str]]:
    yield socket.AF_INET, "0.0.0.0"
    if socket.has_ipv6:
        yield socket.AF_INET6, "::"


def _binds(family: int, address: str, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno in _NO_SUCH_FAMILY
    return True


def host_port(host: str, port: int) -> str:
    """`host:port` with an IPv6 address in brackets, whether it came in brackets or not."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
