"""Slots that change during a run go into its checkpoints: agreed on, under the permit, read where they rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from state.audit import audit
from state.gang import ActorPermit, GangDisagreement, PermitVoid, agree
from state.journal import read_journal
from state.residency import SlotViolation
from state.slots import Slot, Tier
from tests.state.toy import ToyWorker, bytes_of, cold_worker, ready_worker, values_of
from tests.state.toy_run import ToyRun

TIERS = [Tier.COPY, Tier.DEVICE]
KEPT = (Slot.REF, Slot.OLD_ACTOR)


def keeper(directory: Path, tier: Tier = Tier.COPY, **options: object) -> ToyWorker:
    """Actor 1, ref 2, teacher 3, then two more versions of the actor, 11 and 21, both in the ring."""
    worker = ready_worker(directory, tier=tier, kept=KEPT, keep_old_actors=2, **options)
    for rollout_id in range(2):
        with worker.machine.step(rollout_id) as scope:
            scope.before_write()
            worker.masters.step(10)
        worker.machine.snapshot(Slot.OLD_ACTOR)
    return worker


def read(worker: ToyWorker, permit: ActorPermit, slot: Slot, version: int | None = None) -> set[float]:
    with worker.machine.reading(permit, slot, version):
        return values_of(worker.model)


def held_in(worker: ToyWorker, slot: Slot, version: int | None = None) -> set[float]:
    with worker.machine.saving(agree([worker.machine.attest(with_kept=True)], "s")) as permit:
        return read(worker, permit, slot, version)


@pytest.mark.parametrize("tier", TIERS)
def test_each_kept_slot_is_read_where_it_rests_and_the_actor_is_live_before_and_after(
    tmp_path: Path, tier: Tier
) -> None:
    worker = keeper(tmp_path, tier)
    before, transitions = bytes_of(worker.model), len(worker.entries())
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")
    assert [(k.slot, k.version) for k in quorum.kept] == [(Slot.OLD_ACTOR, 1), (Slot.OLD_ACTOR, 2), (Slot.REF, 0)]
    with worker.machine.saving(quorum) as permit:
        seen = {}
        for record in worker.machine.kept:
            version = record.version if record.slot is Slot.OLD_ACTOR else None
            seen[record.slot, record.version] = read(worker, permit, record.slot, version) - {1.0}
            assert bytes_of(worker.model) == before
    # The buffer of ones in every snapshot is the actor's own: the optimizer moves parameters alone.
    assert seen == {(Slot.OLD_ACTOR, 1): {11.0}, (Slot.OLD_ACTOR, 2): {21.0}, (Slot.REF, 0): {2.0}}
    assert len(worker.entries()) == transitions + 2  # save, done: nothing was switched


def test_what_does_not_change_during_a_run_is_not_kept(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")
    assert quorum.kept == ()
    with worker.machine.saving(quorum) as permit, pytest.raises(PermitVoid, match="is not about it"):
        read(worker, permit, Slot.TEACHER)


def test_a_permit_without_the_kept_slots_does_not_let_them_out(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    with worker.machine.saving(worker.quorum()) as permit, pytest.raises(PermitVoid, match="is not about it"):
        read(worker, permit, Slot.REF)


def test_a_slot_refreshed_after_the_gang_agreed_does_not_get_out(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")
    worker.machine.snapshot(Slot.REF)
    with worker.machine.saving(quorum) as permit, pytest.raises(PermitVoid, match="is not about it as recorded"):
        read(worker, permit, Slot.REF)


def test_a_publish_reads_no_other_slot(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    quorum = agree([worker.machine.attest(with_kept=True)], "p1")
    with worker.machine.publishing(quorum) as permit, pytest.raises(PermitVoid, match="for publish, not for save"):
        read(worker, permit, Slot.REF)


def test_an_ended_permit_reads_nothing(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    with worker.machine.saving(agree([worker.machine.attest(with_kept=True)], "s1")) as permit:
        pass
    with pytest.raises(PermitVoid, match="has ended"):
        read(worker, permit, Slot.REF)


def test_a_writer_that_fails_leaves_the_actor_live(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    before = bytes_of(worker.model)
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")
    with (
        pytest.raises(OSError, match="disk full"),
        worker.machine.saving(quorum) as permit,
        worker.machine.reading(permit, Slot.REF),
    ):
        raise OSError("disk full")
    assert bytes_of(worker.model) == before
    assert worker.machine.state == "resident.actor"


@pytest.mark.parametrize("tier", TIERS)
def test_bytes_that_rotted_where_they_rest_are_found_before_anything_is_written(tmp_path: Path, tier: Tier) -> None:
    worker = keeper(tmp_path, tier)
    with worker.machine.borrow(Slot.OLD_ACTOR, 1):
        pass
    key = next(k for k in worker.store._backing if k.slot is Slot.OLD_ACTOR and k.version == 1)
    worker.store._backing[key][0][20] ^= 1
    with pytest.raises(GangDisagreement, match=r"rank 0 holds old_actor@1 as .*, not "):
        agree([worker.machine.attest(with_kept=True)], "s1")


def test_ranks_must_keep_the_same_slots_at_the_same_versions(tmp_path: Path) -> None:
    workers = [keeper(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    workers[1].machine.snapshot(Slot.REF)
    with pytest.raises(GangDisagreement, match=r"what is kept beside it differs: rank 0: .*ref@0; rank 1: .*ref@2"):
        agree([w.machine.attest(with_kept=True) for w in workers], "s1")


def test_replicas_of_a_kept_slot_that_differ_are_named(tmp_path: Path) -> None:
    workers = [cold_worker(tmp_path, rank=rank, world_size=2, kept=KEPT) for rank in range(2)]
    for worker in workers:
        worker.load(Slot.ACTOR, 1)
        worker.load(Slot.REF, 2 + worker.machine.view().worker.rank)
        worker.machine.ready()
    with pytest.raises(GangDisagreement, match=r"ref@0: the same shard of norm.weight .* has different bytes: rank 0"):
        agree([w.machine.attest(with_kept=True) for w in workers], "s1")


def test_the_digest_of_a_kept_slot_is_that_of_the_weights_it_was_taken_from(tmp_path: Path) -> None:
    """Over two ranks that hold a shard each."""
    workers = [ready_worker(tmp_path, rank=rank, world_size=2, kept=KEPT) for rank in range(2)]
    for worker in workers:
        worker.machine.snapshot(Slot.REF)
    quorum = agree([w.machine.attest(with_kept=True) for w in workers], "s1")
    assert [k.digest for k in quorum.kept] == [quorum.digest]


def test_attesting_does_not_copy(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    pointers = {name: t.data_ptr() for name, t in worker.weights.tensors().items()}
    worker.machine.attest(with_kept=True)
    assert {name: t.data_ptr() for name, t in worker.weights.tensors().items()} == pointers


def test_while_asleep_there_is_nothing_to_agree_on(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")
    worker.machine.sleep()
    with pytest.raises(GangDisagreement, match="rank 0 is in state asleep"):
        agree([worker.machine.attest(with_kept=True)], "s2")
    with pytest.raises(PermitVoid, match="is now at"), worker.machine.saving(quorum):
        pytest.fail("nothing may be saved")


def test_what_was_kept_is_journaled_under_the_save_it_belongs_to(tmp_path: Path) -> None:
    worker = keeper(tmp_path)
    assert held_in(worker, Slot.OLD_ACTOR, 1) == {11.0, 1.0}
    entry = next(e for e in read_journal(tmp_path / "journal" / "actor-0.jsonl") if e["kind"] == "kept")
    assert (entry["slot"], entry["version"], entry["publish_id"]) == ("old_actor", 1, "s")
    assert entry["digest"] == worker.machine.record(Slot.OLD_ACTOR, 1).digest


def kept_entry_is_wrong(tmp_path: Path, **changes: object) -> str:
    worker = keeper(tmp_path)
    held_in(worker, Slot.REF)
    path = tmp_path / "journal" / "actor-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [entry | changes if entry["kind"] == "kept" else entry for entry in lines]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))
    report = audit(tmp_path)
    return " ".join(str(f) for f in report.findings if f.journal == "actor-0.jsonl" and "kept" in str(f))


def test_the_audit_finds_a_kept_slot_with_other_bytes_or_outside_its_save(tmp_path: Path) -> None:
    assert kept_entry_is_wrong(tmp_path / "whole") == ""
    assert "I2" in kept_entry_is_wrong(tmp_path / "digest", digest="0" * 16)
    assert "I2" in kept_entry_is_wrong(tmp_path / "version", version=7)
    assert "I2" in kept_entry_is_wrong(tmp_path / "other", publish_id="elsewhere")


def lose_the_way_home(worker: ToyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors come back but the buffer, which no digest covers."""
    homes = {name: home for name, home in worker.store._homes.items() if name != "seen"}

    def point_at(key: object) -> None:
        monkeypatch.setattr(worker.store, "_pointed", key)
        monkeypatch.setattr(worker.store, "_homes", homes)

    monkeypatch.setattr(worker.store, "_point_at", point_at)


def test_a_rank_whose_tensors_do_not_come_back_from_an_attestation_is_poisoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = keeper(tmp_path)
    lose_the_way_home(worker, monkeypatch)
    with pytest.raises(KeyError):
        worker.machine.attest(with_kept=True)
    assert worker.machine.state == "poisoned"


def test_a_rank_whose_tensors_do_not_come_back_from_a_save_is_poisoned_whatever_the_writer_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = keeper(tmp_path)
    quorum = agree([worker.machine.attest(with_kept=True)], "s1")

    def save_whatever_happens() -> None:
        with worker.machine.saving(quorum) as permit:
            lose_the_way_home(worker, monkeypatch)
            with suppress(KeyError):
                read(worker, permit, Slot.REF)
            with pytest.raises(PermitVoid, match="has ended"):
                permit.require("save")

    with pytest.raises(SlotViolation, match="done actor in state poisoned"):
        save_whatever_happens()
    assert worker.machine.state == "poisoned"


@pytest.fixture
def saved_run(tmp_path: Path) -> Path:
    """A run of two ranks whose reference was refreshed after its second rollout, and then saved."""
    run = ToyRun(tmp_path, kept=KEPT)
    run.begin()
    run.rollouts(2)
    for worker in run.workers:
        worker.machine.snapshot(Slot.REF)
        worker.machine.snapshot(Slot.OLD_ACTOR)
    run.save(1)
    run.finish()
    return tmp_path


def rewrite(run_dir: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> list[str]:
    """What the audit finds after `change` of every entry of a journal; None leaves the entry out."""
    path = run_dir / "journal" / f"{name}.jsonl"
    changed = [c for e in read_journal(path) if (c := change(e)) is not None]
    path.write_text("".join(json.dumps(entry | {"seq": seq}) + "\n" for seq, entry in enumerate(changed, 1)))
    return [str(finding) for finding in audit(run_dir).findings]


def test_the_audit_of_a_save_with_kept_slots_finds_nothing(saved_run: Path) -> None:
    assert audit(saved_run).ok


def test_the_audit_finds_a_slot_that_one_rank_did_not_keep(saved_run: Path) -> None:
    def without_ref(entry: dict[str, Any]) -> dict[str, Any] | None:
        return None if entry["kind"] == "kept" and entry["slot"] == "ref" else entry

    (found,) = rewrite(saved_run, "actor-1", without_ref)
    assert "I10" in found
    assert "actor/1 kept ref@2 as nothing, agreed on was" in found


def test_the_audit_finds_a_kept_slot_that_nobody_agreed_on(saved_run: Path) -> None:
    found = rewrite(saved_run, "driver", lambda entry: entry | {"slots": []} if entry["kind"] == "save" else entry)
    assert len(found) == 6
    assert all("I10" in one and "agreed on was nothing" in one for one in found)
