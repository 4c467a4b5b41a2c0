"""The fleet over stand-ins for engines: orders, faults and what is left afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.fleet import Fleet, FleetLimits
from orchestrator.proof_verdict import ProofVerdict
from orchestrator.rollouts.engine_lanes import EngineLost
from orchestrator.roster import EngineGone, NoEngineLeft
from state.digest_records import Region, TensorDigest
from state.engine_life import EngineLifeError, EnginePhase
from state.gang import fingerprint
from state.journal import Journal, read_journal
from state.slots import Slot, WeightId
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, Proof
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import plan_send

A, B = "run/engine/0", "run/engine/1"
TENSORS = (TensorDigest("w", "float32", (2,), 7),)
PLAN = plan_send({"w": ((0, Region.whole((2,))),)}, TENSORS, 100)
MEETING = Rendezvous((A, B), ())
LIMITS = FleetLimits(start_s=5, ping_s=5, phase_s=5, flush_attempts=4, flush_pause_s=0.5)
Answer = Callable[[], Any]


def manifest(version: int, publish_id: str | None = None) -> Manifest:
    return Manifest("run", publish_id or f"p{version}", Slot.ACTOR, WeightId(1, version), TENSORS)


class StandIn:
    """An engine that does as told: `answers` has a list of things to do per verb; after that it just works."""

    def __init__(self, engine_id: str, log: list[tuple[str, str]]) -> None:
        self.engine_id, self.log = engine_id, log
        self.answers: dict[str, list[Answer]] = {}
        self.killed = False
        self._publish_id: str | None = None

    async def call(self, verb: str, *args: Any) -> Any:
        self.log.append((self.engine_id, verb))
        await asyncio.sleep(0)
        if verb == "begin_update":
            self._publish_id = args[0].publish_id
        if self.answers.get(verb):
            result = self.answers[verb].pop(0)()
            return await result if isinstance(result, Awaitable) else result
        return Proof(self.engine_id, self._publish_id, TENSORS) if verb == "prove" else None

    def kill(self) -> None:
        self.killed = True


def fails(error: Exception) -> Answer:
    def do() -> None:
        raise error

    return do


def hangs() -> Any:
    return asyncio.Event().wait()


class World:
    """Two stand-ins, their fleet and its journal."""

    def __init__(self, directory: Path, limits: FleetLimits = LIMITS) -> None:
        self.log: list[tuple[str, str]] = []
        self.slept: list[float] = []
        self.a, self.b = StandIn(A, self.log), StandIn(B, self.log)
        self.path = directory / "fleet.jsonl"
        self.fleet = Fleet([self.a, self.b], Journal(self.path, "fleet"), limits, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def publish(self, version: int) -> tuple[str, ...]:
        wanted = manifest(version)
        await self.fleet.begin_update(wanted)
        await self.fleet.receive(PLAN, MEETING)
        verdict = await self.fleet.prove(wanted)
        return await self.fleet.commit(wanted, [e for e, found in verdict.items() if found.holds])

    def phase(self, engine_id: str) -> tuple[EnginePhase, WeightId | None, str | None]:
        (status,) = [s for s in self.fleet.views() if s.engine_id == engine_id]
        return status.phase, status.weights, status.reason

    def verbs(self, engine_id: str) -> list[str]:
        return [verb for engine, verb in self.log if engine == engine_id]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_engines_come_up_stale(world: World):
    async def story() -> None:
        assert await world.fleet.start() == (A, B)

    asyncio.run(story())
    assert world.phase(A) == (EnginePhase.STALE, None, "never published to")
    assert world.fleet.serving(WeightId(0, 0)) == ()


def test_a_publish_goes_step_by_step_over_all_engines_and_resumes_after_the_proof(world: World):
    async def story() -> None:
        await world.fleet.start()
        world.log.clear()
        assert await world.publish(1) == (A, B)

    asyncio.run(story())
    steps = ["pause", "flush", "begin_update", "receive", "prove", "commit", "resume"]
    assert world.log == [(engine, verb) for verb in steps for engine in (A, B)]
    assert world.fleet.serving(WeightId(1, 1)) == (A, B)
    assert world.fleet.serving(WeightId(1, 0)) == ()


def test_no_engine_serves_from_the_first_pause_until_the_commit(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        seen = []

        def look() -> None:
            seen.append(world.fleet.serving(WeightId(1, 1)) + world.fleet.serving(WeightId(1, 2)))

        for verb in ("pause", "flush", "begin_update", "receive", "commit", "resume"):
            world.a.answers[verb] = [look]
        await world.publish(2)
        assert seen == [()] * 6

    asyncio.run(story())
    assert world.fleet.serving(WeightId(1, 2)) == (A, B)


def test_a_refused_flush_is_tried_again(world: World):
    world.b.answers["flush"] = [fails(EngineRefused("3 in flight"))] * 2

    async def story() -> None:
        await world.fleet.start()
        assert await world.publish(1) == (A, B)

    asyncio.run(story())
    assert world.verbs(B).count("flush") == 3
    assert world.verbs(A).count("flush") == 1
    assert world.slept == [0.5, 0.5]


def test_an_engine_that_never_flushes_is_not_sent_to_and_the_other_goes_on(world: World):
    world.b.answers["flush"] = [fails(EngineRefused("3 in flight"))] * 100

    async def story() -> None:
        await world.fleet.start()
        assert await world.fleet.begin_update(manifest(1)) == (A,)

    asyncio.run(story())
    assert world.verbs(B)[-5:] == ["flush", "flush", "flush", "flush", "abort"]
    assert world.phase(B) == (EnginePhase.STALE, None, "EngineRefused: 3 in flight (asked 4 times)")


def test_when_no_engine_can_be_prepared_each_ones_reason_is_told(world: World):
    for engine in (world.a, world.b):
        engine.answers["pause"] = [fails(ValueError(f"{engine.engine_id} will not"))]

    async def story() -> None:
        await world.fleet.start()
        with pytest.raises(NoEngineLeft) as error:
            await world.fleet.begin_update(manifest(1))
        for engine in (A, B):
            assert f"{engine} is stale (pause: ValueError: {engine} will not)" in str(error.value)

    asyncio.run(story())


def test_an_engine_that_fails_to_receive_is_torn_and_never_resumed(world: World):
    world.b.answers["receive"] = [fails(RuntimeError("connection closed"))]

    async def story() -> None:
        await world.fleet.start()
        await world.fleet.begin_update(manifest(1))
        assert await world.fleet.receive(PLAN, MEETING) == PLAN.nbytes
        verdict = await world.fleet.prove(manifest(1))
        assert verdict == {A: ProofVerdict(), B: ProofVerdict(failed="receive: RuntimeError: connection closed")}
        with pytest.raises(EngineRefused, match=f"not proven to hold publish p1: {B}"):
            await world.fleet.commit(manifest(1), [A, B])
        assert await world.fleet.commit(manifest(1), [A]) == (A,)

    asyncio.run(story())
    assert world.phase(B) == (EnginePhase.STALE, None, "receive: RuntimeError: connection closed")
    assert not {"prove", "commit", "resume"} & set(world.verbs(B))
    assert world.verbs(B)[-1] == "abort"
    assert world.fleet.serving(WeightId(1, 1)) == (A,)


def test_an_engine_that_holds_something_else_is_named_with_the_tensor_and_not_committed(world: World):
    other = TensorDigest("w", "float32", (2,), 8)
    world.b.answers["prove"] = [lambda: Proof(B, "p1", (other,))]

    async def story() -> None:
        await world.fleet.start()
        await world.fleet.begin_update(manifest(1))
        await world.fleet.receive(PLAN, MEETING)
        verdict = await world.fleet.prove(manifest(1))
        assert verdict[A].holds
        assert verdict[B].differences == ("w: digest 0000000000000008 in the engine, 0000000000000007 published",)
        with pytest.raises(EngineRefused, match="not proven"):
            await world.fleet.commit(manifest(1), [A, B])
        assert await world.fleet.commit(manifest(1), [A]) == (A,)

    asyncio.run(story())
    assert world.phase(B)[0] is EnginePhase.STALE
    assert not {"commit", "resume"} & set(world.verbs(B))


def test_a_proof_of_another_publish_proves_nothing(world: World):
    world.b.answers["prove"] = [lambda: Proof(B, "p0", TENSORS)]

    async def story() -> None:
        await world.fleet.start()
        await world.fleet.begin_update(manifest(1))
        await world.fleet.receive(PLAN, MEETING)
        assert (await world.fleet.prove(manifest(1)))[B].differences == ("the proof is of publish p0, not of p1",)

    asyncio.run(story())


def test_nothing_is_committed_that_nobody_proved(world: World):
    async def story() -> None:
        await world.fleet.start()
        with pytest.raises(EngineRefused, match="no publish p1 has begun"):
            await world.fleet.commit(manifest(1), [A])
        await world.fleet.begin_update(manifest(1))
        await world.fleet.receive(PLAN, MEETING)
        with pytest.raises(EngineRefused, match="not proven"):
            await world.fleet.commit(manifest(1), [A])

    asyncio.run(story())
    assert world.fleet.serving(WeightId(1, 1)) == ()


@pytest.mark.parametrize("verb", ["pause", "flush", "begin_update", "receive", "prove", "commit", "resume"])
@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_an_engine_that_is_lost_in_any_step_does_not_stop_the_others(tmp_path: Path, verb: str, fault: str):
    world = World(tmp_path, FleetLimits(start_s=5, ping_s=0.05, phase_s=0.05, flush_attempts=2, flush_pause_s=0))
    world.b.answers[verb] = [fails(EngineGone("killed")) if fault == "dies" else hangs]
    world.b.answers["abort"] = [hangs]

    async def story() -> None:
        await world.fleet.start()
        assert await world.publish(1) == (A,)

    asyncio.run(story())
    assert world.fleet.serving(WeightId(1, 1)) == (A,)
    phase, weights, reason = world.phase(B)
    assert weights is None
    assert phase is (EnginePhase.DEAD if fault == "dies" else EnginePhase.STALE)
    assert reason is not None
    assert ("killed" if fault == "dies" else f"{B} did not answer {verb} within 0.05 s") in reason
    assert world.b.killed == (fault == "dies")


@pytest.mark.parametrize("fault", [fails(EngineGone("OOM")), hangs, fails(ValueError("odd"))])
def test_reconcile_buries_whoever_does_not_answer(tmp_path: Path, fault: Answer):
    world = World(tmp_path, FleetLimits(ping_s=0.05))

    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        world.b.answers["view"] = [fault]
        assert await world.fleet.reconcile() == (A,)
        world.a.answers["view"] = [fault]
        with pytest.raises(NoEngineLeft, match=f"no engine is alive: {A} is dead .*; {B} is dead"):
            await world.fleet.reconcile()

    asyncio.run(story())
    assert world.a.killed
    assert world.b.killed
    assert world.fleet.serving(WeightId(1, 1)) == ()
    assert world.verbs(B).count("view") == 2


def test_an_engine_that_does_not_start_is_dead_and_the_run_goes_on_with_the_rest(tmp_path: Path):
    world = World(tmp_path, FleetLimits(start_s=0.05))
    world.b.answers["view"] = [hangs]
    assert asyncio.run(world.fleet.start()) == (A,)
    assert world.phase(B) == (EnginePhase.DEAD, None, f"TimeoutError: {B} did not answer view within 0.05 s")


def test_no_engine_at_all_is_an_error(tmp_path: Path):
    fleet = Fleet([], Journal(tmp_path / "j", "fleet"), LIMITS)
    with pytest.raises(NoEngineLeft, match="there are none"):
        asyncio.run(fleet.start())


def test_requests_go_only_to_an_engine_that_serves_exactly_those_weights(world: World):
    async def story() -> None:
        await world.fleet.start()
        asked = [GenerateRequest("0", (1,), 0)]
        with pytest.raises(EngineRefused, match=f"{A} is stale with weights None, not serving 1.1"):
            await world.fleet.generate(A, asked, SamplingConfig(), WeightId(1, 1))
        await world.publish(1)
        world.a.answers["generate"] = [lambda: ("result",)]
        assert await world.fleet.generate(A, asked, SamplingConfig(), WeightId(1, 1)) == ("result",)
        with pytest.raises(EngineRefused, match=r"is serving with weights 1\.1, not serving 1\.2"):
            await world.fleet.generate(A, asked, SamplingConfig(), WeightId(1, 2))

    asyncio.run(story())
    assert world.verbs(A).count("generate") == 1


def test_an_engine_that_dies_over_its_requests_is_lost_and_dead(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        world.a.answers["generate"] = [fails(EngineGone("SIGKILL"))]
        with pytest.raises(EngineLost, match=f"{A} died over 1 requests: SIGKILL"):
            await world.fleet.generate(A, [GenerateRequest("0", (1,), 0)], SamplingConfig(), WeightId(1, 1))

    asyncio.run(story())
    assert world.fleet.serving(WeightId(1, 1)) == (B,)
    assert world.phase(A)[0] is EnginePhase.DEAD


def test_an_abort_reaches_only_engines_that_this_publish_has_touched(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        await world.fleet.abort("p2", [A, B], "the gang disagreed")
        assert world.fleet.serving(WeightId(1, 1)) == (A, B)
        assert "abort" not in world.verbs(A)
        await world.fleet.begin_update(manifest(2))
        await world.fleet.abort("p2", [A, B], "the sender died")
        assert world.fleet.serving(WeightId(1, 1)) == ()
        assert world.phase(A) == (EnginePhase.STALE, None, "the sender died")
        await world.publish(3)
        await world.fleet.abort("p3", [A], "the gang fell apart after the commit")
        assert world.fleet.serving(WeightId(1, 3)) == (B,)

    asyncio.run(story())
    assert world.phase(A) == (EnginePhase.STALE, None, "the gang fell apart after the commit")


def test_an_abort_never_fails(tmp_path: Path):
    world = World(tmp_path, FleetLimits(ping_s=0.05))
    world.a.answers["abort"] = [hangs]
    world.b.answers["abort"] = [fails(ValueError("no"))]

    async def story() -> None:
        await world.fleet.start()
        await world.fleet.begin_update(manifest(1))
        await world.fleet.abort("p1", [A, B], "enough")
        assert await world.publish(2) == (A, B)

    asyncio.run(story())


def test_older_weights_are_refused_before_any_engine_is_touched(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(2)
        world.log.clear()
        with pytest.raises(EngineLifeError, match=r"has held weights 1\.2 and cannot go back to 1\.1"):
            await world.fleet.begin_update(manifest(1))

    asyncio.run(story())
    assert world.log == []
    assert world.fleet.serving(WeightId(1, 2)) == (A, B)


def test_weights_older_than_those_of_one_engine_touch_none(world: World):
    async def story() -> None:
        await world.fleet.start()
        world.a.answers["receive"] = [fails(RuntimeError("torn"))]
        assert await world.publish(2) == (B,)
        with pytest.raises(EngineLifeError, match=f"{B} has held weights 1.2"):
            await world.fleet.begin_update(manifest(1))

    asyncio.run(story())
    assert world.phase(A)[0] is EnginePhase.STALE
    assert world.fleet.serving(WeightId(1, 2)) == (B,)


def test_an_update_left_open_is_aborted_by_the_next(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.fleet.begin_update(manifest(1))
        assert await world.publish(2) == (A, B)

    asyncio.run(story())
    entries = [e for e in read_journal(world.path) if e["kind"] == "engine" and e["engine"] == A]
    assert [(e["trigger"], e["reason"]) for e in entries if e["trigger"] == "abort"] == [
        ("abort", "overtaken by p2"),
    ]


def test_a_transfer_that_ends_after_its_publish_was_given_up_harms_no_later_one(world: World):
    async def story() -> None:
        await world.fleet.start()
        late = asyncio.Event()

        async def closed() -> None:
            await late.wait()
            raise RuntimeError("connection closed")

        world.a.answers["receive"] = [closed]
        await world.fleet.begin_update(manifest(1))
        receiving = asyncio.create_task(world.fleet.receive(PLAN, MEETING))
        await asyncio.sleep(0)
        await world.fleet.abort("p1", [A, B], "the sender died")
        await world.fleet.begin_update(manifest(2))
        late.set()
        with pytest.raises(EngineRefused, match="publish p1 was given up while engines were to receive"):
            await receiving
        assert world.phase(A)[0] is EnginePhase.UPDATING
        assert [s.publish_id for s in world.fleet.views()] == ["p2", "p2"]

    asyncio.run(story())


def test_when_the_gang_fails_no_engine_serves_and_an_update_is_given_up_until_the_next_publish(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        await world.fleet.withdraw("the gang failed")
        assert world.fleet.serving(WeightId(1, 1)) == ()
        assert world.log[-2:] == [(A, "abort"), (B, "abort")]
        await world.fleet.begin_update(manifest(2))
        world.a.answers["receive"] = [hangs]
        receiving = asyncio.create_task(world.fleet.receive(PLAN, MEETING))
        await asyncio.sleep(0)
        await world.fleet.withdraw("the gang failed again")
        assert world.phase(A) == world.phase(B) == (EnginePhase.STALE, None, "the gang failed again")
        receiving.cancel()
        await world.publish(3)
        assert world.fleet.serving(WeightId(1, 3)) == (A, B)

    asyncio.run(story())


def test_shutdown_kills_every_engine(world: World):
    async def story() -> None:
        await world.fleet.start()
        world.fleet.shutdown()
        world.fleet.shutdown()

    asyncio.run(story())
    assert world.a.killed
    assert world.b.killed
    assert world.phase(A) == (EnginePhase.DEAD, None, "shut down")


def test_the_journal_tells_each_engines_life(world: World):
    async def story() -> None:
        await world.fleet.start()
        await world.publish(1)
        world.fleet.shutdown()

    asyncio.run(story())
    told = [e for e in read_journal(world.path) if e["engine"] == B]
    assert [e["kind"] for e in told] == ["engine", "engine", "proof", "engine", "engine"]
    assert (told[2]["publish_id"], told[2]["digest"]) == ("p1", fingerprint(TENSORS))
    entries = [e for e in told if e["kind"] == "engine"]
    assert [(e["transition"], e["trigger"], e["before"], e["state"]) for e in entries] == [
        (1, "started", "starting", "stale"),
        (2, "begin_update", "stale", "updating"),
        (3, "commit", "updating", "serving"),
        (4, "die", "serving", "dead"),
    ]
    committed = entries[2]
    assert (committed["incarnation"], committed["version"], committed["publish_id"]) == (1, 1, "p1")
    assert entries[3]["version"] is None
