"""A cluster that is not there is said at once, instead of after minutes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from orchestrator import joining
from orchestrator.joining import require_cluster
from orchestrator.options.problems import ConfigError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_nobody_listens(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConfigError) as said:
        require_cluster(f"127.0.0.1:{port}", "cluster.address", "start one")
    (problem,) = said.value.problems
    assert problem.key == "cluster.address"
    assert f"nobody answers at 127.0.0.1:{port}: Connection refused; start one" in problem.message


def test_somebody_listens_who_is_no_cluster(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "ANSWER_WITHIN_S", 0.2)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError) as said:
        require_cluster(address, "RAY_ADDRESS", "start one")
    (problem,) = said.value.problems
    assert problem.message == f"somebody listens at {address}, but no Ray cluster answers within 0.2 s; start one"


def test_an_address_without_a_port_is_left_to_ray() -> None:
    require_cluster("auto", "cluster.address", "start one")
