"""A node of ours that is about to be taken away asks the run to save and end."""

from __future__ import annotations

import threading
import time

import pytest

from orchestrator.running import drain
from orchestrator.running.drain import next_drained, watching
from orchestrator.running.interrupts import Stop, StopAsked
from tests.e2e.runs import until

NOW_S = 1000.0


@pytest.mark.parametrize(
    ("draining", "found"),
    [
        ({}, None),
        ({"theirs": 1_005_000}, None),
        ({"a": 1_030_000, "b": 1_012_000, "theirs": 1_001_000}, ("b", 12.0)),
        ({"a": 0}, ("a", drain.NO_DEADLINE_S)),
        ({"a": 0, "b": 1_030_000}, ("b", 30.0)),
        ({"a": 999_000}, ("a", 1.0)),
    ],
    ids=["none", "one of others", "the first to end", "no deadline", "a deadline comes first", "overdue"],
)
def test_the_node_of_ours_that_ends_first(draining: dict[str, int], found: tuple[str, float] | None) -> None:
    assert next_drained(draining, {"a", "b"}, NOW_S) == found


def test_the_run_is_asked_to_end_once_with_the_node_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_EVERY_S", 0.01)
    stop, looks = Stop(60.0), iter([None, ("0123456789abcdef", 30.0)])
    ended = pytest.raises(StopAsked, match="node 0123456789ab is being taken away")
    with stop.listening(), watching(stop, lambda: next(looks)), ended, stop.interruptible():
        time.sleep(10)
    assert next(looks, "looked no more") == "looked no more"


def test_a_cluster_that_does_not_say_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_EVERY_S", 0.01)
    asked = []

    def look() -> None:
        asked.append(1)
        raise RuntimeError("no accessor")

    stop = Stop(60.0)
    with stop.listening(), watching(stop, look):
        until(lambda: asked, "it was looked", timeout_s=10)
        until(lambda: "drain" not in [t.name for t in threading.enumerate()], "it is given up", timeout_s=10)
        stop.check()
    assert len(asked) == 1
