import dataclasses

import pytest

from state.engine_life import EngineLife, EngineLifeError, EnginePhase, EngineTransition
from state.slots import WeightId

V1, V2 = WeightId(1, 1), WeightId(1, 2)


def life() -> tuple[EngineLife, list[EngineTransition]]:
    record: list[EngineTransition] = []
    return EngineLife("run/engine/0", record.append), record


def serving(weights: WeightId = V1) -> EngineLife:
    engine, _ = life()
    engine.started()
    engine.begin_update("p1", V1)
    engine.commit("p1", weights)
    return engine


def test_a_new_engine_starts_stale_and_serves_nothing():
    engine, _ = life()
    assert engine.status.phase is EnginePhase.STARTING
    engine.started()
    assert engine.status.phase is EnginePhase.STALE
    assert engine.status.weights is None
    assert not engine.serves(WeightId(0, 0))


def test_only_a_commit_gives_weights():
    engine = serving()
    assert engine.serves(V1)
    assert not engine.serves(V2)
    engine.begin_update("p2", V2)
    assert engine.status.weights is None
    assert not engine.serves(V1)
    engine.commit("p2", V2)
    assert engine.serves(V2)


def test_an_aborted_update_leaves_the_engine_stale_and_says_why():
    engine = serving()
    engine.begin_update("p2", V2)
    engine.abort("torn at bucket 3")
    assert engine.status.phase is EnginePhase.STALE
    assert engine.status.weights is None
    assert engine.status.reason == "torn at bucket 3"
    with pytest.raises(EngineLifeError, match=r"is stale .*torn at bucket 3.* cannot commit"):
        engine.commit("p2", V2)


def test_a_commit_must_be_of_the_update_under_way():
    engine = serving()
    engine.begin_update("p2", V2)
    with pytest.raises(EngineLifeError, match="by publish p2, not by p3"):
        engine.commit("p3", V2)
    assert engine.status.phase is EnginePhase.UPDATING


def test_weights_never_go_back():
    engine = serving(V2)
    with pytest.raises(EngineLifeError, match=r"has held weights 1\.2 and cannot go back to 1\.1"):
        engine.begin_update("p2", V1)
    assert engine.serves(V2)
    engine.begin_update("p2", V2)
    with pytest.raises(EngineLifeError, match=r"cannot go back to 1\.1"):
        engine.commit("p2", V1)
    assert engine.status.phase is EnginePhase.UPDATING
    engine.abort("torn")
    with pytest.raises(EngineLifeError, match="cannot go back"):
        engine.begin_update("p3", V1)
    engine.begin_update("p3", WeightId(2, 0))
    engine.commit("p3", WeightId(2, 0))
    assert engine.serves(WeightId(2, 0))


def test_the_same_weights_may_be_published_again_to_an_engine_that_lost_them():
    engine = serving(V2)
    engine.withdraw("did not flush")
    assert not engine.serves(V2)
    engine.begin_update("p2", V2)
    engine.commit("p2", V2)
    assert engine.serves(V2)


def test_a_woken_engine_is_stale():
    engine = serving()
    engine.sleep()
    assert engine.status.phase is EnginePhase.ASLEEP
    assert not engine.serves(V1)
    engine.wake()
    assert engine.status.phase is EnginePhase.STALE
    assert not engine.serves(V1)


@pytest.mark.parametrize("steps", [[], ["started"], ["started", "update"], ["started", "update", "commit"]])
def test_death_comes_from_anywhere_and_is_final(steps: list[str]):
    engine, _ = life()
    verbs = {
        "started": engine.started,
        "update": lambda: engine.begin_update("p1", V1),
        "commit": lambda: engine.commit("p1", V1),
    }
    for step in steps:
        verbs[step]()
    engine.die("killed")
    assert not engine.alive
    assert not engine.serves(V1)
    for verb in (engine.started, engine.wake, lambda: engine.begin_update("p2", V2), lambda: engine.die("again")):
        with pytest.raises(EngineLifeError, match=r"is dead \(killed\)"):
            verb()


def test_what_is_out_of_order_is_refused_and_changes_nothing():
    engine, record = life()
    for verb in (
        lambda: engine.begin_update("p1", V1),
        lambda: engine.commit("p1", V1),
        lambda: engine.abort("x"),
        engine.sleep,
        engine.wake,
    ):
        with pytest.raises(EngineLifeError, match="run/engine/0 is starting: it cannot"):
            verb()
    assert engine.status.transition == 0
    assert record == []


def test_every_transition_is_recorded_after_it_happened_with_a_status_that_never_changes():
    engine, record = life()
    engine.started()
    first = engine.status
    engine.begin_update("p1", V1)
    engine.commit("p1", V1)
    assert [(r.trigger, r.source, r.status.phase, r.status.transition) for r in record] == [
        ("started", EnginePhase.STARTING, EnginePhase.STALE, 1),
        ("begin_update", EnginePhase.STALE, EnginePhase.UPDATING, 2),
        ("commit", EnginePhase.UPDATING, EnginePhase.SERVING, 3),
    ]
    assert record[-1].status is engine.status
    assert first.phase is EnginePhase.STALE
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.phase = EnginePhase.SERVING  # type: ignore[misc]
