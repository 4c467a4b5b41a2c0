"""What a rank's journal must show of its bytes, entry by entry: each fault is found, and nothing that machines do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from state.findings import Notes, read_file
from state.replay_rank import replay_rank
from state.slots import Provenance, Slot
from state.watch import Watch
from tests.state.journal_edits import findings
from tests.state.toy import fill, ready_worker
from tests.state.toy_run import ToyRun

A, B = "a" * 16, "b" * 16
TIERS = {"actor": "copy", "ref": "copy", "teacher": "device", "old_actor": "copy"}


def step(trigger: str, slot: str = "actor", **more: Any) -> dict[str, Any]:
    """An entry of a transition that is right, but for `more`."""
    before = {"loaded": "loading", "switched": "switching", "commit": "stepping", "unchanged": "stepping"}
    about = {"kind": "transition", "trigger": trigger, "slot": slot, "before": before.get(trigger, "resident.actor")}
    rollout = {"rollout_id": 0} if trigger in ("step", "commit") else {}
    return about | {"version": 0, "digest": A, "live": A, "wrote": False} | rollout | more


def failed(before: str, **more: Any) -> dict[str, Any]:
    return {"kind": "transition", "trigger": "fail", "slot": "actor", "before": before} | more


LOADED = (step("load"), step("loaded"), step("ready"))
LENT = (step("switch", "ref"), step("switched", "ref"))
BACK = (step("switch", before="resident.ref"), step("switched"))
ATTESTED = {"kind": "attested", "transition": 3, "state": "resident.actor", "slot": "actor", "version": 0, "digest": A}
ATTESTED |= {"changed": []}

RIGHT = {
    "a borrow": (*LENT, *BACK),
    "a borrow from the device": (
        step("switch", "teacher"),
        step("switched", "teacher"),
        step("switch", before="resident.teacher"),
        step("switched", live=None),
    ),
    "a step": (step("step"), step("commit", version=1, digest=B, wrote=True)),
    "a step in which every update was skipped": (step("step"), step("commit", version=1)),
    "an error before anything was written": (step("step"), step("unchanged")),
    "a worker that was healed": (
        step("switch", "ref"),
        failed("switching"),
        step("restore", before="poisoned"),
        BACK[1],
    ),
    "an attestation": (ATTESTED | {"live": A, "kept": []},),
    "an attestation inside a borrow": (*LENT, ATTESTED | {"state": "resident.ref", "live": None, "kept": []}),
    "a refusal inside a borrow": (*LENT, {"kind": "refusal", "what": "train", "lent": True}),
    "a refusal": ({"kind": "refusal", "what": "train", "lent": False},),
}
WRONG = {
    "I1 ready actor, and nobody had hashed it": (step("ready", live=None),),
    f"I1 ready actor with live bytes {B}; recorded is {A}": (step("ready", live=B),),
    "I3 ref@0 came in, and nobody had hashed it": (step("switch", "ref"), step("switched", "ref", live=None)),
    "I3 teacher@0 came in, and nobody": (step("switch", "teacher"), step("switched", "teacher", live=None)),
    f"I3 ref@0 came in with live bytes {B}": (step("switch", "ref"), step("switched", "ref", live=B)),
    "I3 actor@0 came in, and nobody had hashed it": (*LENT, BACK[0], step("switched", live=None)),
    "I3 actor@0 came in, and nobody": (step("wake", before="asleep"), step("switched", live=None)),
    "I9 a snapshot of actor was taken with": ({"kind": "snapshot", "slot": "old_actor", "digest": A, "live": B},),
    "I9 a snapshot of actor was taken, and nobody": ({"kind": "snapshot", "slot": "old_actor", "digest": A},),
    f"I2 it attested to actor@0 (up.weight) with live bytes {B}": (
        ATTESTED | {"live": B, "kept": [], "changed": ["up.weight"]},
    ),
    "I3 live bytes were hashed in state asleep": (ATTESTED | {"state": "asleep", "live": A, "kept": []},),
    f"I10 it attested to ref@2 with live bytes {B}": (
        ATTESTED | {"live": A, "kept": [{"slot": "ref", "version": 2, "digest": A, "live": B}]},
    ),
    "I4 actor changed in rollout 0, in which the optimizer did not write": (step("step"), step("commit", digest=B)),
    "I5 actor is said to be unchanged by a step": (step("step"), step("unchanged", wrote=True)),
    "I5 it was restored after an error while stepping": (failed("stepping"), step("restore", before="poisoned")),
    "I3 load teacher began while ref was lent": (*LENT, step("load", "teacher", before="resident.ref")),
    "I3 it is asked to train, and ref is live": (*LENT, {"kind": "refusal", "what": "train", "lent": False}),
    "I3 this worker has no slot critic": (step("load", "critic"),),
    f"I4 live bytes were {B}": (failed("stepping", live=B, recorded=A),),
    f"I2 live bytes were {B}": (failed("publishing", live=B, recorded=A),),
    f"I1 live bytes were {B}": (failed("resident.actor", live=B, recorded=A),),
}


def faults(*entries: dict[str, Any]) -> list[str]:
    watch = Watch(Slot.ACTOR, TIERS)
    for entry in LOADED:
        assert list(watch.see(entry)) == []
    return [f"{invariant} {what}" for entry in entries for invariant, what in watch.see(entry)]


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_wrong_with(name: str) -> None:
    assert faults(*RIGHT[name]) == []


@pytest.mark.parametrize("words", WRONG)
def test_it_is_found_that(words: str) -> None:
    said = faults(*WRONG[words])
    assert len(said) == 1
    assert said[0].startswith(words)


# ---- machines write what a watch looks for -------------------------------------------------------------------------


def audited(directory: Path) -> list[str]:
    """Findings in the worker's journal alone."""
    notes = Notes()
    replay_rank(read_file(directory / "journal" / "actor-0.jsonl", notes), notes)
    return [str(finding) for finding in notes.findings]


def test_bytes_that_were_overwritten_are_found_although_the_gang_refuses_them(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    fill(worker.model, 9)
    worker.machine.attest()
    (found,) = audited(tmp_path)
    assert "I2" in found
    assert "actor/0: it attested to actor@0 (head.weight, norm.weight, up.weight) with live bytes" in found


def test_a_copy_that_was_overwritten_is_found_although_the_worker_is_poisoned(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.begin()
    for block in run.workers[1].store._backing.values():
        block[0].fill_(7)
    with pytest.raises(Exception, match="came back as other bytes"), run.workers[1].machine.borrow(Slot.REF):
        pytest.fail("got in")
    run.finish("failed")
    (found,) = findings(tmp_path)
    assert "I3" in found
    assert "actor/1: live bytes were" in found
    assert "came back as other bytes" in found


def test_an_error_that_leaves_every_byte_as_it_was_is_no_finding(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(ZeroDivisionError), worker.machine.step(0):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), worker.machine.borrow(Slot.REF):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        worker.machine.load(Slot.REF, lambda: 1 // 0, Provenance.random(0))
    worker.machine.heal()
    assert audited(tmp_path) == []
