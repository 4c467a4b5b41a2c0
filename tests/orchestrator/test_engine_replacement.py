"""Engines that die or hang while a run goes on: they are replaced, and nobody is killed for being busy."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.fleet import Fleet, FleetLimits
from orchestrator.rollouts.engine_lanes import EngineLost
from orchestrator.roster import EngineGone, NoEngineLeft, Replacements
from state.engine_life import EnginePhase
from state.findings import JournalFile, Notes
from state.journal import Journal, read_journal
from state.replay_engines import replay_engines
from state.slots import WeightId
from tests.orchestrator.test_fleet import MEETING, PLAN, A, B, StandIn, fails, hangs, manifest
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineDied, GenerateRequest

C, D = "run/engine/2", "run/engine/3"
ONE = [GenerateRequest("0", (1,), 0)]


class Mortal(StandIn):
    """As over Ray, whoever waits for an engine that is killed learns that it is gone."""

    def __init__(self, engine_id: str, log: list[tuple[str, str]]) -> None:
        super().__init__(engine_id, log)
        self._end = asyncio.Event()

    async def call(self, verb: str, *args: Any) -> Any:
        answer = asyncio.create_task(super().call(verb, *args))
        end = asyncio.create_task(self._end.wait())
        await asyncio.wait([answer, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if answer.done():
            return answer.result()
        answer.cancel()
        raise EngineGone("killed")

    def kill(self) -> None:
        super().kill()
        self._end.set()


class World:
    """Two engines, and `budget` more to take the place of dead ones."""

    def __init__(self, directory: Path, budget: int = 2, ping_s: float = 0.05) -> None:
        self.log: list[tuple[str, str]] = []
        self.links = [Mortal(A, self.log), Mortal(B, self.log)]
        self.asked_for: list[tuple[int, int]] = []
        self.path = directory / "fleet.jsonl"
        self.ready = asyncio.Event()
        self.ready.set()
        limits = FleetLimits(start_s=5, ping_s=ping_s, health_interval_s=7.0, phase_s=5)
        replacements = Replacements(self._start, budget)
        self.fleet = Fleet(list(self.links), Journal(self.path, "fleet"), limits, replacements=replacements)

    def _start(self, seat: int, index: int) -> Mortal:
        self.asked_for.append((seat, index))
        link = Mortal(f"run/engine/{index}", self.log)
        link.answers["view"] = [self.ready.wait]
        self.links.append(link)
        return link

    async def publish(self, version: int) -> tuple[str, ...]:
        await self.fleet.reconcile()
        wanted = manifest(version)
        await self.fleet.begin_update(wanted)
        await self.fleet.receive(PLAN, MEETING)
        verdict = await self.fleet.prove(wanted)
        return await self.fleet.commit(wanted, [e for e, found in verdict.items() if found.holds])

    def states(self) -> dict[str, EnginePhase]:
        return {status.engine_id: status.phase for status in self.fleet.views()}


def story(directory: Path, play: Callable[[World], Awaitable[None]], **limits: Any) -> World:
    async def whole() -> World:
        world = World(directory, **limits)
        await world.fleet.start()
        await world.publish(1)
        await play(world)
        return world

    return asyncio.run(asyncio.wait_for(whole(), 20))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_dead_engine_is_replaced_by_one_that_is_stale_until_the_next_publish(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["generate"] = [fails(EngineGone("SIGKILL"))]
        with pytest.raises(EngineLost):
            await world.fleet.generate(A, ONE, SamplingConfig(), WeightId(1, 1))
        await settle()
        assert world.states() == {A: EnginePhase.DEAD, B: EnginePhase.SERVING, C: EnginePhase.STALE}
        assert world.fleet.serving(WeightId(1, 1)) == (B,)
        assert await world.publish(2) == (C, B)
        assert world.fleet.serving(WeightId(1, 2)) == (C, B)

    world = story(tmp_path, play)
    assert world.asked_for == [(0, 2)]


def test_a_replacement_does_the_work_of_its_predecessors_seat(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["view"] = [fails(EngineGone("SIGKILL"))]
        await world.publish(2)
        await settle()
        assert await world.publish(3) == (C, B)

    story(tmp_path, play)


def test_a_publish_does_not_wait_for_a_replacement_while_others_live(tmp_path: Path):
    async def play(world: World) -> None:
        world.ready.clear()
        world.links[1].answers["view"] = [fails(EngineGone("SIGKILL"))]
        assert await world.publish(2) == (A,)
        world.ready.set()
        await settle()
        assert await world.publish(3) == (A, C)

    story(tmp_path, play)


def test_when_all_are_dead_a_publish_waits_for_the_replacements(tmp_path: Path):
    async def play(world: World) -> None:
        for link in world.links:
            link.answers["view"] = [fails(EngineGone("SIGKILL"))]
        world.ready.clear()
        publishing = asyncio.create_task(world.publish(2))
        await settle()
        assert not publishing.done()
        world.ready.set()
        assert set(await publishing) <= {C, D}

    story(tmp_path, play)


def test_replacements_are_bounded_and_then_the_reasons_are_told(tmp_path: Path):
    async def play(world: World) -> None:
        async def die_again_and_again() -> None:
            for _ in range(10):
                for link in world.links:
                    link.answers["view"] = [fails(EngineGone("OOM"))]
                await world.fleet.reconcile()
                await settle()

        with pytest.raises(NoEngineLeft) as error:
            await die_again_and_again()
        assert all(f"{engine} is dead (EngineGone: OOM)" in str(error.value) for engine in (A, B, C, D))
        assert "2 of at most 2 replaced" in str(error.value)

    world = story(tmp_path, play)
    assert len(world.asked_for) == 2
    assert all(link.killed for link in world.links)


def test_an_engine_that_hangs_is_dead_for_whoever_waits_for_it(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["generate"] = [hangs]
        waiting = asyncio.create_task(world.fleet.generate(A, ONE, SamplingConfig(), WeightId(1, 1)))
        await settle()
        world.links[0].answers["view"] = [hangs]
        await world.fleet.check_health()
        with pytest.raises(EngineLost, match=f"{A} died over 1 requests"):
            await waiting
        assert world.links[0].killed

    world = story(tmp_path, play)
    (status,) = [s for s in world.fleet.views() if s.engine_id == A]
    assert status.reason == f"TimeoutError: {A} did not answer view within 0.05 s"


def test_an_engine_that_works_long_but_answers_is_left_alone(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["generate"] = [hangs]
        waiting = asyncio.create_task(world.fleet.generate(A, ONE, SamplingConfig(), WeightId(1, 1)))
        for _ in range(3):
            await world.fleet.check_health()
        assert not waiting.done()
        waiting.cancel()

    assert story(tmp_path, play).asked_for == []


def test_an_engine_that_says_that_it_died_is_replaced(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["generate"] = [fails(EngineDied("the server exited with -9"))]
        with pytest.raises(EngineLost, match="exited with -9"):
            await world.fleet.generate(A, ONE, SamplingConfig(), WeightId(1, 1))

    world = story(tmp_path, play)
    assert world.asked_for == [(0, 2)]
    assert world.links[0].killed


def test_health_checks_pause_during_a_publish_and_go_on_after_one_that_failed(tmp_path: Path):
    async def play(world: World) -> None:
        await world.fleet.begin_update(manifest(2))
        world.links[0].answers["view"] = [hangs]
        await world.fleet.check_health()
        assert world.states()[A] is EnginePhase.UPDATING
        await world.fleet.abort("p2", [A, B], "the sender died")
        await world.fleet.check_health()
        assert world.states()[A] is EnginePhase.DEAD

    story(tmp_path, play)


def test_a_check_that_a_publish_overtakes_kills_nobody(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["view"] = [hangs]
        checking = asyncio.create_task(world.fleet.check_health())
        await settle()
        await world.fleet.begin_update(manifest(2))
        await checking
        assert world.states()[A] is EnginePhase.UPDATING
        assert not world.links[0].killed

    story(tmp_path, play)


def test_engines_are_looked_after_again_and_again(tmp_path: Path):
    async def play(world: World) -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        world.fleet._sleep = sleep
        watching = asyncio.create_task(world.fleet.watch())
        world.links[1].answers["view"] = [lambda: None, fails(EngineGone("SIGKILL"))]
        while world.states()[B] is not EnginePhase.DEAD:
            await asyncio.sleep(0)
        watching.cancel()
        assert set(slept) == {7.0}

    story(tmp_path, play)


def test_nothing_is_replaced_when_the_run_ends(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["view"] = [fails(EngineGone("SIGKILL"))]
        world.ready.clear()
        await world.fleet.check_health()
        world.fleet.shutdown()
        await settle()

    world = story(tmp_path, play)
    assert world.asked_for == [(0, 2)]
    assert set(world.states().values()) == {EnginePhase.DEAD}


def test_a_journal_with_a_replacement_is_a_true_one(tmp_path: Path):
    async def play(world: World) -> None:
        world.links[0].answers["view"] = [fails(EngineGone("SIGKILL"))]
        await world.fleet.check_health()
        await settle()
        await world.publish(2)
        world.fleet.shutdown()

    world = story(tmp_path, play)
    notes = Notes()
    histories = replay_engines(JournalFile("fleet", tuple(read_journal(world.path)), False), notes)
    assert [entry["trigger"] for entry in histories[C].lives[0]] == ["started", "begin_update", "commit", "die"]
    assert not notes.findings
