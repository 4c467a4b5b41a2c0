"""Every rank and every engine of a real run fails at every boundary, by an exception and by SIGKILL: each time the gang
or the engine is replaced, and all weights are, to the bit, those of a run that nothing happened to.

One run has one fault after another, a gang or an engine for each; so a wrong byte from any of them would show in all
checkpoints that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Ended, Place, journal, merged
from tests.faults.hooks import ENGINE_HOOK, ENGINE_VERBS, ENVIRONMENT, RANK_HOOK, Fault, write

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1200)]

WAYS = tuple(product(("before", "after"), ("raise", "kill")))
IN_INIT = ("load", "loaded", "switch", "switched", "ready")
"""Triggers that a gang comes to before it has trained anything."""
LATER = ("step", "commit", "save", "done saving", "publish", "done publishing", "sleep", "wake", "bucket")
"""Those that it comes to, for the second time, after it has trained and saved one rollout."""
SMALL: dict[str, Any] = {
    "checkpoint": {"save_interval": 1, "keep": 2},
    "cluster": {"offload_train": True, "max_gang_restarts": 1000},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "max_engine_replacements": 1000},
}


def of_ranks(when: str, how: str) -> list[Fault]:
    """One for each incarnation. A rank that dies in init leaves the gang where it began, so that the next failure is
    one that comes after a step: the same twice over one rollout would end the run."""

    def at(triggers: Sequence[str], nth: int) -> list[Fault]:
        # Ranks take turns, other ones for each way to fail; buckets are sent by rank 0 alone.
        ranks = [0 if trigger == "bucket" else (n + WAYS.index((when, how))) % 2 for n, trigger in enumerate(triggers)]
        return [
            Fault(f"actor/{rank}", trigger, when, how, nth)  # type: ignore[arg-type]
            for rank, trigger in zip(ranks, triggers, strict=True)
        ]

    later, init = at(LATER, 2), at(IN_INIT, 1)
    mixed = [fault for pair in zip_longest(later, init) for fault in pair if fault is not None]
    return [replace(fault, incarnation=number) for number, fault in enumerate(mixed, 1)]


HEALTHY = 3
"""The engine that nothing happens to: a publish that finds none is the end of a run."""
FLEET: dict[str, Any] = {
    "cluster": {"offload_train": False},
    "weights": {"timeout_s": 10.0},  # how long the others wait for one that dies before it has joined their group
    "rollout": {"num_engines": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 2},
}


def of_engines() -> list[Fault]:
    """The engine in the first seat raises at one verb after another; those in the next two die of them, and so do the
    engines that replace them, which get the numbers that follow."""
    updating = [(at, when) for at in (*ENGINE_VERBS, "bucket") if at != "generate" for when in ("before", "after")]
    deadly = [*updating, ("generate", "before"), ("generate", "after")]
    numbers = [number for number in range(1, len(deadly) + 2) if number != HEALTHY]
    # Buckets come only with a transfer that gets so far, so that they are counted otherwise.
    turn = {"bucket before": 3, "bucket after": 5}
    return [
        *(
            Fault("engine/0", at, when, "raise", turn.get(f"{at} {when}", 2 + 2 * n))  # type: ignore[arg-type]
            for n, (at, when) in enumerate(updating)
        ),
        *(Fault(f"engine/{n}", at, when, "kill") for n, (at, when) in zip(numbers, deadly, strict=True)),  # type: ignore[arg-type]
    ]


def go(place: Place, name: str, changes: dict[str, Any], faults: Sequence[Fault], rollouts: int) -> Ended:
    write(faults, place.path / "faults.json")
    config = place.config(name, merged(merged(SMALL, changes), {"loop": {"num_rollout": rollouts}}))
    return place.run("train", config, timeout_s=1200.0)


def digests(run_dir: Path) -> dict[int, str]:
    """Of what was saved last as each iteration."""
    return {entry["iteration"]: entry["digest"] for entry in journal(run_dir, "driver", "save")}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "faults.json"))
    return Place(tmp_path)


RANKS_FAIL_OVER = len(LATER) + 2
"""Rollouts."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    place = Place(tmp_path_factory.mktemp("untouched"))
    assert go(place, "untouched", {}, [], RANKS_FAIL_OVER).code == 0
    return digests(place.path / "untouched")


@pytest.mark.parametrize(("when", "how"), WAYS)
def test_a_rank_fails_at_every_boundary(untouched: dict[int, str], place: Place, when: str, how: str) -> None:
    faults = of_ranks(when, how)
    assert len(faults) == len(IN_INIT) + len(LATER)

    ended = go(place, "failing", {"train": {"setup_hook": RANK_HOOK}}, faults, RANKS_FAIL_OVER)

    assert ended.code == 0, ended.output[-5000:]
    run_dir = place.path / "failing"
    failures = journal(run_dir, "driver", "gang_failed")
    assert len(failures) == len(faults)
    for fault, failure in zip(faults, failures, strict=True):
        assert failure["incarnation"] == fault.incarnation
        told = f"on purpose: {fault}" in failure["reason"] or fault.who in failure["ranks"]
        assert told, (str(fault), failure)
    assert digests(run_dir) == untouched
    audit = place.run("audit", run_dir)
    assert audit.code == 0, audit.output[:5000]


def test_an_engine_fails_at_every_boundary(place: Place) -> None:
    faults = of_engines()
    rollouts = 80
    assert go(place, "untouched", FLEET, [], rollouts).code == 0

    ended = go(place, "failing", merged(FLEET, {"rollout": {"setup_hook": ENGINE_HOOK}}), faults, rollouts)

    assert ended.code == 0, ended.output[-5000:]
    run_dir = place.path / "failing"
    assert journal(run_dir, "driver", "gang_failed") == [], "what engines fail of costs no gang"
    engines = journal(run_dir, "fleet", "engine")
    for fault in faults:
        of_it = [e for e in engines if e["engine"] == f"failing/{fault.who}" and e["reason"] is not None]
        wanted = ("die", "EngineGone") if fault.how == "kill" else ("abort", f"on purpose: {fault}")
        assert any(e["trigger"] == wanted[0] and wanted[1] in e["reason"] for e in of_it), str(fault)
    assert digests(run_dir) == digests(place.path / "untouched")
    audit = place.run("audit", run_dir)
    assert audit.code == 0, audit.output[:5000]
