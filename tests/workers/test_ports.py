import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from workers import ports
from workers.ports import host_port, reserve

HOLD = (
    "import sys; from workers.ports import reserve; r = reserve(int(sys.argv[1])); print(r.first, flush=True); input()"
)


def test_many_at_once_get_ports_of_their_own_that_can_be_bound() -> None:
    """One of the ports they would take is somebody else's already."""
    with ExitStack() as stack:
        foreign = stack.enter_context(socket.socket())
        foreign.bind(("0.0.0.0", 23_000))
        foreign.listen()
        with ThreadPoolExecutor(16) as pool:
            reserved = list(pool.map(lambda _: reserve(2, start_at=22_999), range(64)))
        for one in reserved:
            stack.callback(one.close)
        taken = [port for one in reserved for port in one.ports]
        assert len(set(taken)) == 128
        assert 23_000 not in taken
        assert all(one.ports == range(one.first, one.first + 2) for one in reserved)
        for port in taken:
            with socket.socket() as server:
                server.bind(("127.0.0.1", port))


def _holder(count: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_reservation_holds_against_other_processes_and_ends_with_its_own() -> None:
    process, first = _holder(3)
    try:
        with ExitStack() as stack:
            other = reserve(3)
            stack.callback(other.close)
            assert not set(other.ports) & set(range(first, first + 3))
    finally:
        process.kill()
        process.communicate()
    again = reserve(3, start_at=first)
    assert again.first == first
    again.close()


def test_running_out_of_ports_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(family: int, address: str, port: int) -> bool:
        return False

    monkeypatch.setattr(ports, "_binds", never)
    with pytest.raises(OSError, match="no 2 free ports in a row between"):
        reserve(2)


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("10.0.0.7", "10.0.0.7:5"),
        ("fe80::1", "[fe80::1]:5"),
        ("[fe80::1]", "[fe80::1]:5"),
        ("node-3.cluster", "node-3.cluster:5"),
    ],
)
def test_addresses_of_every_kind_are_written_so_that_they_can_be_read(host: str, written: str) -> None:
    assert host_port(host, 5) == written
