"""What a live run does when engines are lost: it publishes to those that are left, or ends with the reason."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.loops import train_loop
from orchestrator.publish import Published
from orchestrator.resume.continuity import ContinuityBroken, Expected
from orchestrator.rollouts.engine_lanes import NoEngineServes
from orchestrator.roster import NoEngineLeft
from orchestrator.running.interrupts import Stop
from orchestrator.running.live_run import LiveRun
from orchestrator.waiting import WorkerFailed
from state.continuity import Probe
from state.slots import WeightId
from workers.weights.errors import TransportError


class Engines:
    """`ManagerClient` and `Publisher` in one. `deaths`: by publish, in order, how many engines die over it; -1: it
    fails with all alive, as `raised` says."""

    def __init__(self, deaths: list[int], alive: int = 3, raised: Exception | None = None) -> None:
        self.deaths, self.alive, self.raised, self.dead = deaths, alive, raised, 0
        self.log: list[str] = []

    def publish(self, publish_id: str) -> Published:
        self.log.append(publish_id)
        dying = self.deaths.pop(0) if self.deaths else 0
        self.dead += max(dying, 0)
        if dying:
            raise WorkerFailed("the transfer broke", raised=self.raised)
        return Published(WeightId(1, 4), "", ("engine",), 0, 0.0, 0.0)

    def dead_engines(self) -> tuple[str, ...]:
        return tuple(f"engine/{i}" for i in range(self.dead))

    def reconcile(self) -> tuple[str, ...]:
        self.log.append("reconcile")
        if self.dead >= self.alive:
            raise WorkerFailed("no engine is alive")
        return ("engine",)


class Rollout:
    """Lost over all engines as often as told."""

    def __init__(self, losses: int) -> None:
        self.losses, self.asked_again = losses, list[WeightId]()

    def wait(self) -> None:
        if self.losses:
            self.losses -= 1
            raise NoEngineServes("all lost")

    def again(self, weights: WeightId) -> None:
        self.asked_again.append(weights)


class Directory:
    incarnation = 1
    path = Path()


def live(engines: Engines, casualties: Mapping[str, str] = MappingProxyType({})) -> LiveRun:
    parts: Any = engines
    nothing: Any = None
    directory: Any = Directory()
    gangs: Any = SimpleNamespace(casualties=lambda: casualties)
    return LiveRun(Config(), directory, gangs, parts, parts, nothing, nothing, Stop(0.0), {})


class Gang:
    """Holds another reference than was saved."""

    role = "actor"
    probe_taken = Probe("float32", (-1.0,), (-1.0,), 0.5, 3, (0.1, 0.1))

    def agree(self, publish_id: str, *, with_kept: bool = False) -> Any:
        kept = [SimpleNamespace(slot="ref", version=2, digest="other")] if with_kept else []
        return SimpleNamespace(digest="actor", kept=kept)

    def probe(self) -> Probe:
        return self.probe_taken


def test_a_kept_slot_with_other_bytes_than_were_saved_ends_the_run_before_anything_is_published() -> None:
    engines, anyone, nothing = Engines([]), Gang(), None
    gangs: Any = SimpleNamespace(actor=anyone, all=(anyone,))
    parts: Any = engines
    directory: Any = Directory()
    unset: Any = nothing
    saved = Expected(
        "actor", Path("ckpt"), Gang.probe_taken, "actor", {"ref@2": "saved"}, True, fatal=False, allowed=False
    )
    run = LiveRun(Config(), directory, gangs, parts, parts, unset, unset, Stop(0.0), {"actor": saved})
    with pytest.raises(ContinuityBroken, match="the digest of ref@2 is other, saved was saved"):
        train_loop(run, Config.model_validate({"loop": {"num_rollout": 1}}), 0)
    assert engines.log == []


def test_a_publish_that_an_engine_died_in_is_begun_anew_under_another_id() -> None:
    engines = Engines([1])
    live(engines).publish()
    assert engines.log == ["publish-1-1", "reconcile", "publish-1-2"]


WAITED = TransportError("trainer rank 0 waited up to 10 s for engine/0 to join")
LEFT = NoEngineLeft("no engine received the weights")


@pytest.mark.parametrize("raised", [WAITED, LEFT])
def test_a_publish_that_broke_over_an_engine_that_lives_is_begun_anew_within_bounds(raised: Exception) -> None:
    engines = Engines([-1, -1], raised=raised)
    live(engines).publish()
    assert engines.log == ["publish-1-1", "reconcile", "publish-1-2", "reconcile", "publish-1-3"]

    engines = Engines([-1] * 9, raised=raised)
    with pytest.raises(WorkerFailed, match="the transfer broke"):
        live(engines).publish()
    assert engines.log[-2:] == ["publish-1-3", "reconcile"]


def test_what_no_engine_has_to_do_with_is_not_tried_again() -> None:
    engines = Engines([-1], raised=RuntimeError("on a rank"))
    with pytest.raises(WorkerFailed, match="the transfer broke"):
        live(engines).publish()
    assert engines.log == ["publish-1-1", "reconcile"]


@pytest.mark.parametrize("deaths", [[1], [-1]])
def test_a_publish_that_a_rank_failed_in_is_the_gangs_failure_whatever_engines_did(deaths: list[int]) -> None:
    engines = Engines(deaths, raised=WAITED)
    with pytest.raises(WorkerFailed, match="the transfer broke"):
        live(engines, {"actor/1": "poisoned"}).publish()
    assert engines.log == ["publish-1-1"]


def test_when_all_are_dead_the_run_ends_with_the_reason() -> None:
    with pytest.raises(WorkerFailed, match="no engine is alive"):
        live(Engines([3])).publish()


def test_when_all_were_lost_over_a_rollout_it_is_published_at_once_and_generated_again() -> None:
    engines, rollout = Engines([]), Rollout(losses=2)
    anyone: Any = rollout
    live(engines).wait(anyone)
    assert engines.log == ["publish-1-1", "publish-1-2"]
    assert rollout.asked_again == [WeightId(1, 4)] * 2
