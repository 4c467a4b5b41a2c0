"""The slot machine on a worker small enough to see through. Each guard that is taken away turns one of these red."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from state.errors import InvariantViolation
from state.gang import ActorPermit, GangDisagreement, PermitVoid, Quorum, agree
from state.journal import read_journal
from state.machine import NotFinite, Poisoned, SlotMachine
from state.residency import SlotViolation
from state.slots import Provenance, Slot, Tier
from state.store import NotHeld
from tests.state.toy import AUXILIARY, PADDING, ToyWorker, bytes_of, cold_worker, fill, ready_worker, values_of

TIERS = [Tier.COPY, Tier.DEVICE]
LETTING_OUT = ["publishing", "saving"]


class Injected(Exception):
    pass


def outlet(machine: SlotMachine, name: str, quorum: Quorum) -> AbstractContextManager[ActorPermit]:
    return machine.publishing(quorum) if name == "publishing" else machine.saving(quorum)


def train(worker: ToyWorker, rollout_id: int, amount: float = 1) -> None:
    with worker.machine.step(rollout_id) as scope:
        scope.before_write()
        worker.masters.step(amount)


def train_and_fail(worker: ToyWorker, *, announced: bool, wrote: bool) -> None:
    with worker.machine.step(0) as scope:
        if announced:
            scope.before_write()
        if wrote:
            worker.masters.step(1)
        raise Injected


def restores_of(worker: ToyWorker) -> list[object]:
    return [t for t in worker.triggers() if t in ("fail", "restore")]


# ---- init: I1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("loaded", [s for n in range(4) for s in itertools.permutations(AUXILIARY, n)])
def test_whatever_was_loaded_and_in_which_order_init_ends_with_the_actor_live(
    tmp_path: Path, tier: Tier, loaded: tuple[Slot, ...]
) -> None:
    for position in range(len(loaded) + 1):
        worker = cold_worker(tmp_path / str(position), tier=tier)
        for slot in (*loaded[:position], Slot.ACTOR, *loaded[position:]):
            worker.load(slot, 1 if slot is Slot.ACTOR else 5, version=0)
        worker.machine.ready()
        assert worker.machine.state == "resident.actor"
        assert values_of(worker.model) == {1}
        quorum = worker.quorum()
        assert (quorum.slot, quorum.weights.version) == (Slot.ACTOR, 0)


def test_the_slot_loaded_last_is_no_actor_until_ready(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.ACTOR, 1)
    worker.load(Slot.TEACHER, 3)
    with pytest.raises(GangDisagreement, match=r"resident\.teacher"):
        worker.quorum()
    with pytest.raises(SlotViolation, match="refuses to train rollout 0"):
        train(worker, 0)


@pytest.mark.parametrize("name", LETTING_OUT)
def test_an_actor_that_ready_did_not_verify_neither_leaves_nor_trains(tmp_path: Path, name: str) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.ACTOR, 1)
    with (
        pytest.raises(SlotViolation, match=r"ready\(\) has not verified"),
        outlet(worker.machine, name, worker.quorum()),
    ):
        pytest.fail("got in")
    with pytest.raises(SlotViolation, match=r"ready\(\) has not verified"):
        train(worker, 0)


def test_an_actor_loaded_again_must_be_verified_again(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    worker.load(Slot.ACTOR, 4)
    with pytest.raises(SlotViolation, match=r"ready\(\) has not verified"):
        train(worker, 0)
    worker.machine.ready()
    train(worker, 0)


def test_ready_sees_bytes_that_are_not_those_loaded(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.ACTOR, 1)
    worker.model.head.data[0, 0] = 7
    with pytest.raises(Poisoned, match="other bytes than were loaded"):
        worker.machine.ready()
    assert worker.machine.state == "poisoned"


def test_ready_sees_masters_of_other_weights(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.ACTOR, 1)
    worker.masters.masters["norm"] += 1
    with pytest.raises(Poisoned, match="1 parameters differ, among them norm"):
        worker.machine.ready()
    assert worker.machine.state == "poisoned"


def test_ready_without_an_actor_is_refused_and_nothing_is_done(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.REF, 2)
    with pytest.raises(NotHeld, match="never filled here; filled: ref"):
        worker.machine.ready()
    assert worker.machine.state == "resident.ref"


def test_versions_only_grow(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    worker.load(Slot.ACTOR, 1, version=5)
    worker.machine.ready()
    with pytest.raises(SlotViolation, match="which only grows"):
        worker.load(Slot.ACTOR, 1, version=4)
    with pytest.raises(SlotViolation, match="already at version 5"):
        train(worker, 4)
    train(worker, 5)
    assert worker.machine.record(Slot.ACTOR).version == 6


def test_a_slot_that_this_worker_does_not_have_is_refused(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(NotHeld, match="critic"):
        worker.load(Slot.CRITIC, 1)
    with pytest.raises(NotHeld, match="critic"), worker.machine.borrow(Slot.CRITIC):
        pytest.fail("got in")
    with pytest.raises(NotHeld, match="old_actor@3"), worker.machine.borrow(Slot.OLD_ACTOR, version=3):
        pytest.fail("got in")
    assert worker.machine.state == "resident.actor"


# ---- borrow: I3 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("raises", [False, True])
def test_a_borrow_is_a_bit_exact_no_op(tmp_path: Path, tier: Tier, raises: bool) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    train(worker, 0, 0.37)
    worker.machine.snapshot(Slot.OLD_ACTOR)
    train(worker, 1, 0.11)
    worker.model.dropout.eval()
    pick = random.Random(0)

    def everything() -> tuple[object, ...]:
        masters = {n: m.tolist() for n, m in worker.masters.masters.items()}
        modes = [m.training for m in worker.model.modules()]
        return bytes_of(worker.model), masters, modes, torch.get_rng_state().tolist()

    before = everything()
    for _ in range(10):
        slot, version = pick.choice([(Slot.REF, None), (Slot.TEACHER, None), (Slot.OLD_ACTOR, 1), (Slot.OLD_ACTOR, 2)])
        try:
            with worker.machine.borrow(slot, version):
                worker.model.train(pick.random() < 0.5)
                torch.rand(3)
                if raises:
                    raise Injected
        except Injected:
            pass
        assert everything() == before
        assert worker.machine.state == "resident.actor"


@pytest.mark.parametrize("tier", TIERS)
def test_inside_a_borrow_the_other_slot_computes_and_only_it(tmp_path: Path, tier: Tier) -> None:
    """The score of a slot changes if, and only if, that slot does."""

    def scores(values: dict[Slot, float]) -> dict[Slot, float]:
        worker = cold_worker(tmp_path / str(values), tier=tier)
        for slot, value in values.items():
            worker.load(slot, value, version=0)
        worker.machine.ready()
        worker.model.eval()
        result = {}
        for slot in (Slot.ACTOR, Slot.REF, Slot.TEACHER):
            with worker.machine.borrow(slot) as record:
                assert record.slot is slot
                assert worker.machine.view().resident == record
                result[slot] = float(worker.model(torch.ones(6, dtype=torch.bfloat16)).detach())
        return result

    base = {Slot.ACTOR: 1.0, Slot.REF: 2.0, Slot.TEACHER: 3.0}
    expected = scores(base)
    assert len(set(expected.values())) == 3
    for slot in base:
        changed = scores(base | {slot: 5.0})
        assert {s for s in base if changed[s] != expected[s]} == {slot}


@pytest.mark.parametrize("tier", TIERS)
def test_training_after_scoring_the_reference_trains_the_actor(tmp_path: Path, tier: Tier) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    with worker.machine.borrow(Slot.REF):
        pass
    with pytest.raises(Injected), worker.machine.borrow(Slot.REF):
        raise Injected
    train(worker, 0)
    assert {float(x) for x in worker.model.norm.detach()} == {2.0}
    assert worker.masters.master_mismatches() == []
    with worker.machine.borrow(Slot.REF):
        assert values_of(worker.model) == {2}


@pytest.mark.parametrize("tier", TIERS)
def test_no_trained_step_is_lost_to_a_borrow(tmp_path: Path, tier: Tier) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    for rollout_id in range(3):
        with worker.machine.borrow(Slot.REF):
            pass
        train(worker, rollout_id)
        trained = bytes_of(worker.model)
        with worker.machine.borrow(Slot.TEACHER):
            assert bytes_of(worker.model) != trained
        assert bytes_of(worker.model) == trained


def test_writes_into_a_borrowed_slot_do_not_reach_the_actor(tmp_path: Path) -> None:
    for tier in TIERS:
        worker = ready_worker(tmp_path / tier, tier=tier)
        with worker.machine.borrow(Slot.REF):
            fill(worker.model, 9)
        assert values_of(worker.model) == {1}
        worker.quorum()


Verb = Callable[[ToyWorker], object]
FORBIDDEN_IN_A_BORROW: dict[str, Verb] = {
    "step": lambda w: train(w, 0),
    "borrow": lambda w: w.machine.borrow(Slot.TEACHER).__enter__(),
    "borrow the actor": lambda w: w.machine.borrow(Slot.ACTOR).__enter__(),
    "sleep": lambda w: w.machine.sleep(),
    "snapshot": lambda w: w.machine.snapshot(Slot.OLD_ACTOR),
    "wake": lambda w: w.machine.wake(),
}
FORBIDDEN_WHATEVER_IS_BORROWED: dict[str, Verb] = {
    "step": lambda w: train(w, 0),
    "sleep": lambda w: w.machine.sleep(),
    "ready": lambda w: w.machine.ready(),
    "load": lambda w: w.load(Slot.REF, 4),
    "load the actor": lambda w: w.load(Slot.ACTOR, 4),
    "publish": lambda w: w.machine.publishing(w.quorum()).__enter__(),
    "save": lambda w: w.machine.saving(w.quorum()).__enter__(),
}


@pytest.mark.parametrize("slot", [Slot.ACTOR, Slot.REF])
@pytest.mark.parametrize("verb", FORBIDDEN_WHATEVER_IS_BORROWED)
def test_inside_a_borrow_also_of_the_actor_nothing_else_begins(tmp_path: Path, verb: str, slot: Slot) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.borrow(slot):
        live = values_of(worker.model)
        with pytest.raises(InvariantViolation):
            FORBIDDEN_WHATEVER_IS_BORROWED[verb](worker)
        assert values_of(worker.model) == live
    assert values_of(worker.model) == {1}
    FORBIDDEN_WHATEVER_IS_BORROWED[verb](worker)


@pytest.mark.parametrize("verb", FORBIDDEN_IN_A_BORROW)
def test_inside_a_borrow_nothing_happens_to_the_actor(tmp_path: Path, verb: str) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.borrow(Slot.REF):
        with pytest.raises(SlotViolation):
            FORBIDDEN_IN_A_BORROW[verb](worker)
        assert values_of(worker.model) == {2}
    assert values_of(worker.model) == {1}
    assert worker.entries("refusal")


@pytest.mark.parametrize("name", LETTING_OUT)
def test_a_quorum_of_before_does_not_let_the_reference_out(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)
    quorum = worker.quorum()
    with worker.machine.borrow(Slot.REF):
        with pytest.raises(GangDisagreement):
            worker.quorum()
        with pytest.raises(PermitVoid), outlet(worker.machine, name, quorum):
            pytest.fail("got in")


# ---- errors while bytes move: I5 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_loader_that_fails_poisons_and_the_actor_can_be_restored(tmp_path: Path, tier: Tier) -> None:
    worker = ready_worker(tmp_path, tier=tier)

    def half() -> None:
        worker.model.up.data.fill_(9)
        raise Injected("disk")

    with pytest.raises(Injected):
        worker.machine.load(Slot.REF, half, Provenance.random(0))
    view = worker.machine.view()
    assert (view.state, view.resident) == ("poisoned", None)
    assert "Injected: disk" in view.detail
    with pytest.raises(SlotViolation, match="Injected: disk"):
        train(worker, 0)
    with pytest.raises(GangDisagreement, match="Injected: disk"):
        worker.quorum()
    worker.machine.heal()
    assert values_of(worker.model) == {1}
    worker.quorum()
    with pytest.raises(NotHeld), worker.machine.borrow(Slot.REF):  # what the loader left of it is not the reference
        pytest.fail("got in")
    worker.load(Slot.REF, 2)
    worker.machine.ready()
    with worker.machine.borrow(Slot.REF):
        assert values_of(worker.model) == {2}


def test_a_failed_first_load_of_the_actor_cannot_be_healed(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    with pytest.raises(ZeroDivisionError):
        worker.machine.load(Slot.ACTOR, lambda: 1 / 0, Provenance.random(0))
    with pytest.raises(InvariantViolation):
        worker.machine.heal()
    assert worker.machine.state == "poisoned"


def break_second_block(worker: ToyWorker, slot: Slot) -> list[torch.Tensor]:
    (key,) = [k for k in worker.store._backing if k.slot is slot]
    good = worker.store._backing[key]
    worker.store._backing[key] = [good[0], torch.zeros(3, dtype=torch.uint8), *good[2:]]
    return good


def test_a_copy_that_breaks_off_on_the_way_in_poisons_and_heals(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    break_second_block(worker, Slot.REF)
    with pytest.raises(RuntimeError), worker.machine.borrow(Slot.REF):
        pytest.fail("got in")
    assert worker.machine.state == "poisoned"
    worker.machine.heal()
    assert values_of(worker.model) == {1}
    assert restores_of(worker) == ["fail", "restore"]


def test_a_copy_that_breaks_off_on_the_way_back_poisons_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(RuntimeError, match="size"), worker.machine.borrow(Slot.REF):
        good = break_second_block(worker, Slot.ACTOR)
    assert worker.machine.state == "poisoned"
    worker.store._backing[worker.machine._primary] = good
    worker.machine.heal()
    assert values_of(worker.model) == {1}


def test_a_backing_copy_that_changed_is_seen_and_never_trusted(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(Poisoned, match="recorded"), worker.machine.borrow(Slot.REF):
        worker.store._backing[worker.machine._primary][0][0] ^= 1
    with pytest.raises(Poisoned):
        worker.machine.heal()
    assert worker.machine.state == "poisoned"


@pytest.mark.parametrize("tier", TIERS)
def test_a_resting_slot_that_was_written_to_is_not_computed_with(tmp_path: Path, tier: Tier) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    (resting,) = [blocks for key, blocks in worker.store._backing.items() if key.slot is Slot.REF]
    resting[0][PADDING * 2] ^= 1
    with pytest.raises(Poisoned, match="ref came back as"), worker.machine.borrow(Slot.REF):
        pytest.fail("got in")
    worker.machine.heal()
    assert values_of(worker.model) == {1}


def test_what_a_borrow_leaves_in_a_slot_on_the_device_is_seen_by_the_next(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path, tier=Tier.DEVICE)
    with worker.machine.borrow(Slot.REF):
        worker.model.norm.data[0] = 9
    with pytest.raises(Poisoned, match="ref came back as"), worker.machine.borrow(Slot.REF):
        pytest.fail("got in")


def test_an_interrupt_counts_as_an_error(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.machine.load(Slot.REF, interrupted, Provenance.random(0))
    assert worker.machine.state == "poisoned"


# ---- step: I4, I5, I7 --------------------------------------------------------------------------------------------


def test_a_step_commits_version_digest_and_provenance(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    before = worker.machine.record(Slot.ACTOR)
    with worker.machine.step(0) as scope:
        assert worker.machine.view().resident is None
        scope.before_write()
        worker.masters.step(1)
    record = worker.machine.record(Slot.ACTOR)
    assert (record.version, str(record.provenance)) == (1, "step 0")
    assert record.digest != before.digest
    assert worker.quorum().weights.version == 1


def test_a_rollout_whose_every_step_was_skipped_counts(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    before = worker.machine.record(Slot.ACTOR)
    with worker.machine.step(0):
        pass
    assert worker.machine.record(Slot.ACTOR).version == 1
    assert worker.machine.record(Slot.ACTOR).digest == before.digest


def test_commit_waits_for_the_gather_before_it_hashes(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.step(0) as scope:
        scope.before_write()
        worker.masters.outstanding = lambda: worker.masters.step(1)
    assert worker.masters.gathers == 1
    worker.quorum()


def test_an_error_before_the_first_write_leaves_everything_as_it_was(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(Injected):
        train_and_fail(worker, announced=False, wrote=False)
    assert worker.triggers()[-1] == "unchanged"
    assert worker.machine.record(Slot.ACTOR).version == 0
    worker.quorum()
    train(worker, 0)


def test_a_write_that_was_not_announced_is_seen_when_an_error_follows(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(Injected):
        train_and_fail(worker, announced=False, wrote=True)
    assert worker.machine.state == "poisoned"


def test_bytes_that_changed_in_a_step_in_which_nobody_wrote_are_not_committed(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(Poisoned, match="changed in rollout 0, and nobody wrote"), worker.machine.step(0):
        worker.model.norm.data[0] = 7
    assert worker.machine.state == "poisoned"


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["up", "norm", "head"])
def test_a_step_that_leaves_a_value_that_is_not_finite_is_fatal_and_names_rank_and_tensor(
    tmp_path: Path, name: str, value: float
) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.borrow(Slot.REF):
        pass  # there is a backing copy now, and it must not help
    with pytest.raises(NotFinite, match=rf"actor/0: after rollout 0 1 tensors .* {name}\.weight;") as ended:
        train_to(worker, name, value)
    assert not isinstance(ended.value, InvariantViolation)  # so the gang is built anew, or the run ends with 5
    assert worker.machine.state == "poisoned"
    assert worker.machine.record(Slot.ACTOR).version == 0
    with pytest.raises(Poisoned, match="poisoned while stepping"):
        worker.machine.heal()
    with pytest.raises(GangDisagreement):
        worker.quorum()


def train_to(worker: ToyWorker, name: str, value: float) -> None:
    with worker.machine.step(0) as scope:
        scope.before_write()
        worker.masters.step(1)
        weight = getattr(worker.model, name).data
        weight[(1,) * weight.dim()] = value


def test_the_largest_numbers_are_finite_and_what_belongs_to_no_tensor_does_not_count(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.step(0) as scope:
        scope.before_write()
        worker.model.norm.data[:2] = torch.tensor([1.0, -1.0]) * torch.finfo(torch.bfloat16).max
        worker.model.flat[0] = math.nan  # padding
    assert worker.machine.record(Slot.ACTOR).version == 1


def test_masters_that_moved_without_a_word_are_not_unchanged(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)

    def move_masters_and_fail() -> None:
        with worker.machine.step(0):
            worker.masters.masters["norm"] += 1  # the live bytes have not been written yet
            raise Injected

    with pytest.raises(Injected):
        move_masters_and_fail()
    assert worker.machine.state == "poisoned"


def test_masters_that_cannot_be_compared_are_not_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ready_worker(tmp_path)
    monkeypatch.setattr(worker.masters, "master_mismatches", lambda: 1 / 0)
    with pytest.raises(Injected):
        train_and_fail(worker, announced=False, wrote=False)
    assert worker.machine.state == "poisoned"


@pytest.mark.parametrize("wrote", [False, True])
def test_an_error_after_before_write_is_fatal_whether_bytes_differ_or_not(tmp_path: Path, wrote: bool) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.borrow(Slot.REF):
        pass  # there is a backing copy now, and it must not help
    with pytest.raises(Injected):
        train_and_fail(worker, announced=True, wrote=wrote)
    assert worker.machine.state == "poisoned"
    with pytest.raises(Poisoned, match="poisoned while stepping"):
        worker.machine.heal()
    for verb in FORBIDDEN_IN_A_BORROW.values():
        with pytest.raises(InvariantViolation):
            verb(worker)
    with pytest.raises(SlotViolation):
        worker.load(Slot.ACTOR, 1)
    with pytest.raises(GangDisagreement):
        worker.quorum()


def test_bytes_that_cannot_be_hashed_are_not_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ready_worker(tmp_path)
    monkeypatch.setattr(worker.store, "digest", lambda: 1 / 0)
    with pytest.raises(Injected):
        train_and_fail(worker, announced=False, wrote=False)
    assert worker.machine.state == "poisoned"


def test_heal_is_for_the_poisoned(tmp_path: Path) -> None:
    with pytest.raises(Poisoned, match="not poisoned"):
        ready_worker(tmp_path).machine.heal()


# ---- letting bytes out: I2 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LETTING_OUT)
def test_a_permit_is_good_inside_its_scope_only(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)
    purpose, other = ("publish", "save") if name == "publishing" else ("save", "publish")
    with outlet(worker.machine, name, worker.quorum()) as permit:
        assert worker.machine.state == name
        permit.require(purpose)  # type: ignore[arg-type]
        with pytest.raises(PermitVoid):
            permit.require(other)  # type: ignore[arg-type]
    with pytest.raises(PermitVoid, match="has ended"):
        permit.require(purpose)  # type: ignore[arg-type]
    assert worker.machine.state == "resident.actor"


@pytest.mark.parametrize("name", LETTING_OUT)
def test_an_error_in_the_scope_ends_the_permit_and_leaves_the_actor(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(Injected), outlet(worker.machine, name, worker.quorum()) as permit:
        raise Injected("engine gone")
    with pytest.raises(PermitVoid):
        permit.require("publish" if name == "publishing" else "save")
    assert worker.machine.state == "resident.actor"
    assert worker.entries()[-1]["detail"] == "Injected: engine gone"
    with outlet(worker.machine, name, worker.quorum("p2")):
        pass


@pytest.mark.parametrize("name", LETTING_OUT)
def test_an_error_in_the_scope_after_bytes_changed_poisons(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)

    def overwrite_and_fail() -> None:
        with outlet(worker.machine, name, worker.quorum()):
            fill(worker.model, 9)
            raise Injected

    with pytest.raises(Injected):
        overwrite_and_fail()
    assert worker.machine.state == "poisoned"
    with pytest.raises(Poisoned):
        worker.machine.heal()


MOVES: dict[str, Verb] = {
    "borrow": lambda w: w.machine.borrow(Slot.REF).__enter__() and None,
    "step": lambda w: train(w, 0),
    "ready": lambda w: w.machine.ready(),
    "sleep and wake": lambda w: (w.machine.sleep(), w.machine.wake()),
    "load": lambda w: (w.load(Slot.REF, 2), w.machine.ready()),
}


@pytest.mark.parametrize("name", LETTING_OUT)
@pytest.mark.parametrize("move", MOVES)
def test_a_rank_that_moved_since_it_attested_voids_the_quorum(tmp_path: Path, name: str, move: str) -> None:
    worker = ready_worker(tmp_path)
    quorum = worker.quorum()
    if move == "borrow":
        with worker.machine.borrow(Slot.REF):
            pass
    else:
        MOVES[move](worker)
    with pytest.raises(PermitVoid, match="attested at transition"), outlet(worker.machine, name, quorum):
        pytest.fail("got in")
    assert worker.machine.state == "resident.actor"


@pytest.mark.parametrize("name", LETTING_OUT)
def test_a_quorum_is_used_once(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)
    quorum = worker.quorum()
    with outlet(worker.machine, name, quorum):
        pass
    now = replace(quorum, transitions=(worker.machine.view().transition,))
    with pytest.raises(PermitVoid, match="was used before"), outlet(worker.machine, name, now):
        pytest.fail("got in")


FORGERIES: dict[str, Callable[[Quorum], Quorum]] = {
    "slot": lambda q: replace(q, slot=Slot.REF),
    "version": lambda q: replace(q, weights=replace(q.weights, version=9)),
    "incarnation": lambda q: replace(q, weights=replace(q.weights, incarnation=9)),
    "digest": lambda q: replace(q, summaries=("f" * 16,)),
    "run": lambda q: replace(q, run="other"),
    "role": lambda q: replace(q, role="critic"),
    "config": lambda q: replace(q, config_hash="other"),
    "gang size": lambda q: replace(q, transitions=(*q.transitions, 3), summaries=(*q.summaries, "x")),
    "transition": lambda q: replace(q, transitions=(0,)),
}


@pytest.mark.parametrize("what", FORGERIES)
@pytest.mark.parametrize("name", LETTING_OUT)
def test_a_quorum_that_is_not_about_this_rank_is_void(tmp_path: Path, name: str, what: str) -> None:
    worker = ready_worker(tmp_path)
    forged = FORGERIES[what](worker.quorum())
    with pytest.raises(PermitVoid), outlet(worker.machine, name, forged):
        pytest.fail("got in")
    assert worker.machine.state == "resident.actor"


@pytest.mark.parametrize("name", LETTING_OUT)
def test_bytes_that_changed_without_a_step_do_not_leave(tmp_path: Path, name: str) -> None:
    worker = ready_worker(tmp_path)
    worker.model.up.data[0, 0] = 1.0078125  # one bit
    with pytest.raises(GangDisagreement, match=r"rank 0 has live bytes .* but recorded"):
        worker.quorum()


def test_nothing_moves_while_bytes_leave(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with worker.machine.publishing(worker.quorum()) as permit:
        for verb in FORBIDDEN_IN_A_BORROW.values():
            with pytest.raises(SlotViolation):
                verb(worker)
        with pytest.raises(SlotViolation):
            worker.load(Slot.REF, 2)
        permit.require("publish")


def test_an_attestation_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ready_worker(tmp_path)
    real = worker.store.digest

    def digest_while_another_thread_moves() -> object:
        monkeypatch.undo()
        worker.machine.ready()
        return real()

    monkeypatch.setattr(worker.store, "digest", digest_while_another_thread_moves)
    with pytest.raises(SlotViolation, match="a transition came in between"):
        worker.machine.attest()


def test_one_of_two_ranks_is_on_the_reference(tmp_path: Path) -> None:
    workers = [ready_worker(tmp_path, rank=r, world_size=2) for r in range(2)]
    assert agree([w.machine.attest() for w in workers], "p1").weights.version == 0
    with (
        workers[1].machine.borrow(Slot.REF),
        pytest.raises(GangDisagreement, match=r"rank 1 is in state resident\.ref"),
    ):
        agree([w.machine.attest() for w in workers], "p2")


def test_a_critic_is_saved_but_never_published(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path, primary=Slot.CRITIC)
    worker.machine.load(Slot.CRITIC, lambda: fill(worker.model, 4), Provenance.random(0))
    worker.masters.reload()
    worker.machine.ready()
    with pytest.raises(SlotViolation, match="publish"), worker.machine.publishing(worker.quorum()):
        pytest.fail("got in")
    with worker.machine.saving(worker.quorum("p2")) as permit:
        permit.require("save")


# ---- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("keep", [1, 2])
def test_the_ring_holds_the_newest_versions_exactly(tmp_path: Path, tier: Tier, keep: int) -> None:
    worker = ready_worker(tmp_path, tier=tier, keep_old_actors=keep)
    seen = {}
    for rollout_id in range(4):
        worker.machine.snapshot(Slot.OLD_ACTOR)
        seen[rollout_id] = bytes_of(worker.model)
        train(worker, rollout_id)
    for version in range(4):
        if version < 4 - keep:
            with pytest.raises(NotHeld), worker.machine.borrow(Slot.OLD_ACTOR, version=version):
                pytest.fail("got in")
        else:
            with worker.machine.borrow(Slot.OLD_ACTOR, version=version) as record:
                assert record.version == version
                assert bytes_of(worker.model) == seen[version]
    assert len([k for k in worker.store._backing if k.slot is Slot.OLD_ACTOR]) == keep


def test_the_old_actor_of_the_present_version_is_the_actor_itself(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    moves = worker.machine.view().transition
    with worker.machine.borrow(Slot.OLD_ACTOR, version=0) as record:
        assert record.slot is Slot.ACTOR
    assert worker.machine.view().transition == moves


@pytest.mark.parametrize("tier", TIERS)
def test_a_refreshed_reference_is_the_actor_of_then(tmp_path: Path, tier: Tier) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    train(worker, 0)
    record = worker.machine.snapshot(Slot.REF)
    assert (record.version, str(record.provenance)) == (1, "snapshot of actor@1")
    then = bytes_of(worker.model)
    train(worker, 1)
    with worker.machine.borrow(Slot.REF):
        assert bytes_of(worker.model) == then


def test_only_what_is_recorded_is_snapshotted(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    with pytest.raises(SlotViolation, match="the primary itself"):
        worker.machine.snapshot(Slot.ACTOR)
    worker.model.norm.data[0] = 7
    with pytest.raises(Poisoned, match="changed outside a step"):
        worker.machine.snapshot(Slot.REF)


# ---- sleeping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("borrowed", [False, True])
def test_a_woken_worker_is_who_it_was(tmp_path: Path, tier: Tier, borrowed: bool) -> None:
    worker = ready_worker(tmp_path, tier=tier)
    if borrowed:
        with worker.machine.borrow(Slot.REF):
            pass
    train(worker, 0)
    before = bytes_of(worker.model)
    worker.machine.sleep()
    assert worker.machine.view().resident is None
    assert worker.model.flat.untyped_storage().nbytes() == 0
    for verb in (*FORBIDDEN_IN_A_BORROW.values(), lambda w: w.load(Slot.REF, 1)):
        if verb is not FORBIDDEN_IN_A_BORROW["wake"]:
            with pytest.raises(SlotViolation):
                verb(worker)
    with pytest.raises(GangDisagreement, match="asleep"):
        worker.quorum()
    worker.machine.wake()
    assert bytes_of(worker.model) == before
    worker.quorum()
    train(worker, 1)


def test_a_failed_wake_poisons_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ready_worker(tmp_path)
    worker.machine.sleep()

    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(worker.store, "reclaim", no_memory)
    with pytest.raises(MemoryError):
        worker.machine.wake()
    assert worker.machine.state == "poisoned"
    monkeypatch.undo()
    worker.machine.heal()
    assert values_of(worker.model) == {1}


def test_a_failed_sleep_ends_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ready_worker(tmp_path)

    def broken(key: object) -> None:
        raise Injected

    monkeypatch.setattr(worker.store, "release", broken)
    with pytest.raises(Injected):
        worker.machine.sleep()
    assert worker.machine.state == "resident.actor"
    worker.quorum()


# ---- seeing it: I12 ----------------------------------------------------------------------------------------------


def test_every_transition_and_refusal_is_journaled_in_order(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    train(worker, 0)
    with pytest.raises(SlotViolation):
        train(worker, 0)
    with worker.machine.publishing(worker.quorum()):
        pass
    entries = list(read_journal(tmp_path / "journal" / "actor-0.jsonl"))
    assert entries[0]["kind"] == "created"
    transitions = [e for e in entries if e["kind"] == "transition"]
    assert [e["transition"] for e in transitions] == list(range(1, worker.machine.view().transition + 1))
    assert all(a["after"] == b["before"] for a, b in itertools.pairwise(transitions))
    assert [e["what"] for e in entries if e["kind"] == "refusal"] == ["train rollout 0: actor is already at version 1"]


def test_reading_the_state_waits_for_nothing(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    seen: list[str] = []
    with worker.machine._live.lock, worker.machine.step(0):
        reader = threading.Thread(target=lambda: seen.append(worker.machine.view().state))
        reader.start()
        reader.join(timeout=20)
    assert seen == ["stepping"]


def test_the_view_says_whose_the_bytes_are_whatever_is_done_with_them(tmp_path: Path) -> None:
    worker = ready_worker(tmp_path)
    before = worker.machine.view().to_json()
    with worker.machine.step(0):
        stepping = worker.machine.view().to_json()
        assert (stepping["state"], stepping["slot"], stepping["digest"]) == ("stepping", "actor", None)
    with worker.machine.saving(agree([worker.machine.attest()], "save-1-0")):
        saving = worker.machine.view().to_json()
        assert (saving["state"], saving["slot"], saving["version"]) == ("saving", "actor", 1)
        assert saving["digest"] == worker.machine.record(Slot.ACTOR).digest
    assert before["version"] == 0


def test_the_view_says_where_bytes_came_from(tmp_path: Path) -> None:
    worker = cold_worker(tmp_path)
    provenance = Provenance.checkpoint("ckpt/base", 7)
    worker.machine.load(Slot.REF, lambda: fill(worker.model, 2), provenance)
    row = worker.machine.view().to_json()
    assert (row["slot"], row["state"], row["provenance"]) == ("ref", "resident.ref", "ckpt/base @ 7")
    assert row["last_transition"] == "loaded"
