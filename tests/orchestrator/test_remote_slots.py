"""Which run of a cluster is meant."""

from __future__ import annotations

import socket
import time

import pytest

from orchestrator.cli import main
from orchestrator.exit_codes import ExitCode
from orchestrator.options.problems import ConfigError
from orchestrator.remote_slots import choose


@pytest.mark.parametrize(("there", "named", "chosen"), [(["a"], None, "a"), (["a", "b"], "b", "b"), (["a"], "a", "a")])
def test_the_only_run_or_the_named_one(there: list[str], named: str | None, chosen: str) -> None:
    assert choose(there, named) == chosen


@pytest.mark.parametrize(
    ("there", "named", "said"),
    [
        ([], None, "none"),
        (["b", "a"], None, "a, b"),
        (["a"], "c", "c is not going on"),
        (["a"], "c", "without --address"),
    ],
)
def test_otherwise_it_says_what_is_there(there: list[str], named: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(there, named)


def test_an_address_that_nobody_listens_on_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        began = time.monotonic()
        assert main(["slots", "--address", f"127.0.0.1:{taken.getsockname()[1]}"]) == ExitCode.CONFIG
    assert time.monotonic() - began < 15
    assert "nobody answers" in capsys.readouterr().err
