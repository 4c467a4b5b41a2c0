"""A publish: in this order, unanimously, and with proof; and what becomes of it when something fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import publish as publishing
from orchestrator.proof_verdict import ProofVerdict
from orchestrator.publish import Publisher, PublishFailed
from orchestrator.roster import NoEngineLeft
from orchestrator.waiting import WorkerFailed
from state.digest_records import Region, TensorDigest
from state.errors import InvariantViolation
from state.gang import GangDisagreement, PermitVoid, Quorum
from state.journal import Journal
from state.slots import Slot, WeightId
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Endpoint

TENSORS = (TensorDigest("w", "float32", (4,), 7),)
QUORUM = Quorum(
    publish_id="publish-1-1",
    run="run",
    role="actor",
    slot=Slot.ACTOR,
    weights=WeightId(1, 3),
    config_hash="c",
    transitions=(5, 5),
    summaries=("a", "a"),
    tensors=TENSORS,
    holders={"w": ((0, Region.whole((4,))),)},
)


class Stage:
    """Stands in for gang and fleet: records what is asked of them, in order, and fails where it is told to."""

    def __init__(self, fail_at: str | None = None, error: Exception | None = None, **verdicts: ProofVerdict) -> None:
        self.calls: list[str] = []
        self.aborted: dict[str, str] = {}
        self.ended_with: list[str | None] = []
        self._fail_at, self._error = fail_at, error or WorkerFailed("gone")
        self._verdicts = verdicts or {"e0": ProofVerdict(), "e1": ProofVerdict()}

    def _did(self, what: str) -> None:
        self.calls.append(what)
        if what == self._fail_at:
            raise self._error

    # the gang
    def agree(self, publish_id: str) -> Quorum:
        self._did("agree")
        return QUORUM

    def begin_publish(self, quorum: Quorum) -> None:
        self._did("enter")

    def open_endpoints(self, plan: Any, engines: tuple[str, ...]) -> tuple[Endpoint, ...]:
        self._did("open")
        return (Endpoint(0, "127.0.0.1", 1, "t"),)

    def send(self, plan: Any) -> dict[str, str]:
        self._did("send")
        return {"actor/0": "sending", "actor/1": "sending"}

    def end_publish(self, failure: str | None) -> None:
        self.ended_with.append(failure)
        self._did("leave")

    # the fleet
    def reconcile(self) -> tuple[str, ...]:
        self._did("reconcile")
        return tuple(self._verdicts)

    def begin_update(self, manifest: Manifest) -> tuple[str, ...]:
        self._did("pause and flush")
        self.manifest = manifest
        return tuple(self._verdicts)

    def receive(self, plan: Any, rendezvous: Any) -> str:
        self._did("receive")
        self.rendezvous = rendezvous
        return "receiving"

    def prove(self, manifest: Manifest) -> Mapping[str, ProofVerdict]:
        self._did("prove")
        return self._verdicts

    def commit(self, manifest: Manifest, engines: Sequence[str]) -> tuple[str, ...]:
        self._did("commit")
        return tuple(engines)

    def abort(self, publish_id: str, engines: Sequence[str], reason: str) -> None:
        self.aborted |= dict.fromkeys(engines, reason)
        self._did("abort")


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Stage], Publisher]:
    def for_stage(stage: Stage) -> Publisher:
        def all_done(calls: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
            stage._did("everyone is done")
            return dict(calls)

        monkeypatch.setattr(publishing, "gather", all_done)
        journal = Journal(tmp_path / "driver.jsonl", "driver")
        return Publisher(stage, stage, journal, bucket_bytes=1 << 20, timeout_s=1.0)  # type: ignore[arg-type]

    return for_stage


def entries(publisher: Publisher) -> list[dict[str, Any]]:
    return [entry for entry in publisher.journal.recent() if entry["kind"] == "publish"]


def test_every_process_of_an_engine_is_a_member_of_the_groups_that_leaders_broadcast_to(
    publisher: Callable[[Stage], Publisher],
) -> None:
    one, two = Stage(), Stage()
    publisher(one).publish("publish-1-1")
    replace(publisher(two), engine_processes=2).publish("publish-1-1")
    engines = tuple(one._verdicts)
    assert one.rendezvous.engines == engines
    assert two.rendezvous.engines == tuple(f"{engine}/tp{rank}" for engine in engines for rank in (0, 1))


def test_everything_in_its_order(publisher: Callable[[Stage], Publisher]) -> None:
    stage = Stage()
    done = (it := publisher(stage)).publish("publish-1-1")
    assert stage.calls == [
        "reconcile",
        "agree",
        "enter",
        "pause and flush",
        "open",
        "receive",
        "send",
        "everyone is done",
        "prove",
        "commit",
        "leave",
    ]
    assert (done.weights, done.engines) == (WeightId(1, 3), ("e0", "e1"))
    (entry,) = entries(it)
    assert entry["outcome"] == "committed"
    assert entry["engines"] == {"e0": "committed", "e1": "committed"}


def test_the_manifest_is_the_gangs_record(publisher: Callable[[Stage], Publisher]) -> None:
    stage = Stage()
    publisher(stage).publish("publish-1-1")
    assert stage.manifest == Manifest("run", "publish-1-1", Slot.ACTOR, WeightId(1, 3), TENSORS)


@pytest.mark.parametrize(
    ("where", "error"),
    [("agree", GangDisagreement(["rank 1 is in state resident.ref"])), ("enter", PermitVoid("this rank moved"))],
)
def test_a_gang_that_does_not_agree_touches_no_engine(
    publisher: Callable[[Stage], Publisher], where: str, error: InvariantViolation
) -> None:
    stage = Stage(where, error)
    it = publisher(stage)
    with pytest.raises(type(error)):
        it.publish("publish-1-1")
    assert not {"pause and flush", "abort", "commit"} & set(stage.calls)
    assert [entry["outcome"] for entry in entries(it)] == ["refused"]


@pytest.mark.parametrize("where", ["pause and flush", "open", "receive", "send", "everyone is done", "prove", "commit"])
def test_a_failure_on_the_way_leaves_no_engine_serving_and_no_rank_publishing(
    publisher: Callable[[Stage], Publisher], where: str
) -> None:
    stage = Stage(where)
    it = publisher(stage)
    with pytest.raises(WorkerFailed, match="gone"):
        it.publish("publish-1-1")
    assert set(stage.aborted) == {"e0", "e1"}
    assert stage.calls[-1] == "leave"
    assert stage.ended_with[-1] is not None
    (entry,) = entries(it)
    assert entry["outcome"] == "aborted"
    assert "gone" in entry["reason"]


def test_an_engine_that_holds_something_else_is_torn_and_the_others_serve(
    publisher: Callable[[Stage], Publisher],
) -> None:
    stage = Stage(e0=ProofVerdict(), e1=ProofVerdict(("w: digest 1 in the engine, 7 published",)))
    it = publisher(stage)
    assert it.publish("publish-1-1").engines == ("e0",)
    assert entries(it)[0]["engines"]["e1"].startswith("torn: w: digest")


def test_when_no_engine_holds_it_the_publish_has_failed(publisher: Callable[[Stage], Publisher]) -> None:
    stage = Stage(
        e0=ProofVerdict(("w: digest 1 in the engine, 7 published",)), e1=ProofVerdict(failed="receive: RuntimeError")
    )
    it = publisher(stage)
    with pytest.raises(PublishFailed, match="w: digest 1"):
        it.publish("publish-1-1")
    assert "commit" not in stage.calls


def test_engines_that_all_failed_hold_no_other_weights(publisher: Callable[[Stage], Publisher]) -> None:
    """The run may publish again, to those that take their places, or ends as one whose engines failed."""
    stage = Stage(e0=ProofVerdict(failed="receive: EngineGone"), e1=ProofVerdict(failed="receive: RuntimeError: reset"))
    it = publisher(stage)
    with pytest.raises(WorkerFailed, match="e0: receive: EngineGone; e1: receive: RuntimeError: reset") as failed:
        it.publish("publish-1-1")
    assert failed.value.workers == ("e0", "e1")
    assert isinstance(failed.value.raised, NoEngineLeft)
    assert "commit" not in stage.calls


def test_after_a_failure_the_next_publish_can_succeed(publisher: Callable[[Stage], Publisher]) -> None:
    stage = Stage("everyone is done")
    it = publisher(stage)
    with pytest.raises(WorkerFailed):
        it.publish("publish-1-1")
    stage._fail_at = None
    assert it.publish("publish-1-2").engines == ("e0", "e1")


def test_what_fails_in_addition_does_not_hide_why(publisher: Callable[[Stage], Publisher]) -> None:
    class Worse(Stage):
        def abort(self, publish_id: str, engines: Sequence[str], reason: str) -> None:
            raise WorkerFailed("the manager is gone too")

    with pytest.raises(PublishFailed):
        publisher(Worse(e0=ProofVerdict(("w: missing in the engine",)))).publish("publish-1-1")
