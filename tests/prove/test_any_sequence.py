"""Any sequence of calls on real tensors: parameters, a buffer, masters, mode and random state end as the book says."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from state.errors import InvariantViolation
from state.findings import Notes, read_file
from state.gang import GangDisagreement, agree
from state.replay_rank import replay_rank
from state.slots import Slot, Tier
from tests.state.toy import ToyWorker, bytes_of, cold_worker

LOADED = {Slot.REF: 2.0, Slot.TEACHER: 3.0}
AWAKE = precondition(lambda self: self.worker is not None and not self.asleep and not self.dead)


class Injected(Exception):
    pass


class AnySequence(RuleBasedStateMachine):
    """One rank, ready, with two slots beside the actor and a ring of two old actors."""

    worker: ToyWorker | None = None

    @initialize(
        tier=st.sampled_from(Tier),
        order=st.permutations([Slot.ACTOR, Slot.REF, Slot.TEACHER]),
        seed=st.integers(0, 99),
    )
    def init(self, tier: Tier, order: list[Slot], seed: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        torch.manual_seed(seed)
        self.worker = cold_worker(self.directory, tier=tier, keep_old_actors=2)
        for slot in order:
            self.worker.load(slot, 1.0 if slot is Slot.ACTOR else LOADED[slot])
        self.worker.machine.ready()
        self.version, self.publishes = 0, 0
        self.asleep = self.dead = False
        self.held: dict[int, dict[str, bytes]] = {}
        self.ref: dict[str, bytes] | None = None
        self.remember()

    def remember(self) -> None:
        """What the actor is from now on."""
        assert self.worker is not None
        worker = self.worker
        self.actor = bytes_of(worker.model)
        self.masters = {name: master.clone() for name, master in worker.masters.masters.items()}

    @AWAKE
    @rule(
        slot=st.sampled_from([Slot.REF, Slot.TEACHER, Slot.ACTOR]),
        training=st.booleans(),
        fails=st.booleans(),
    )
    def borrow(self, slot: Slot, training: bool, fails: bool) -> None:
        self.borrowed(slot, None, training, fails)

    @AWAKE
    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans())
    def borrow_old(self, data: st.DataObject, fails: bool) -> None:
        self.borrowed(Slot.OLD_ACTOR, data.draw(st.sampled_from(sorted(self.held))), True, fails)

    def borrowed(self, slot: Slot, version: int | None, training: bool, fails: bool) -> None:
        assert self.worker is not None
        worker = self.worker
        before = (worker.model.training, torch.get_rng_state())
        try:
            with worker.machine.borrow(slot, version):
                live = bytes_of(worker.model)
                if slot is Slot.OLD_ACTOR:
                    assert version is not None
                    assert live == self.held[version]
                elif slot is Slot.ACTOR:
                    assert live == self.actor
                elif slot is Slot.REF and self.ref is not None:
                    assert live == self.ref
                else:
                    assert {float(x) for x in worker.model.norm.detach()} == {LOADED[slot]}
                worker.model.train(training)
                torch.rand(3)
                if fails:
                    raise Injected
        except Injected:
            pass
        assert worker.model.training == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])

    @AWAKE
    @rule(amounts=st.lists(st.sampled_from([0.25, 1.0, -0.5]), max_size=2), late=st.booleans(), training=st.booleans())
    def step(self, amounts: list[float], late: bool, training: bool) -> None:
        assert self.worker is not None
        worker = self.worker
        worker.model.train(training)
        with worker.machine.step(self.version) as scope:
            for amount in amounts:
                scope.before_write()
                if late:
                    worker.masters.outstanding = lambda amount=amount: worker.masters.step(amount)
                    worker.masters.finish_gather()
                else:
                    worker.masters.step(amount)
        self.version += 1
        self.remember()

    @AWAKE
    @rule(announced=st.booleans())
    def step_that_fails(self, announced: bool) -> None:
        assert self.worker is not None
        try:
            with self.worker.machine.step(self.version) as scope:
                if announced:
                    scope.before_write()
                    self.worker.masters.step(0.5)
                raise Injected
        except Injected:
            self.dead = announced

    @AWAKE
    @rule(refresh=st.booleans())
    def snapshot(self, refresh: bool) -> None:
        assert self.worker is not None
        self.worker.machine.snapshot(Slot.REF if refresh else Slot.OLD_ACTOR)
        if refresh:
            self.ref = self.actor
        else:
            self.held[self.version] = self.actor
            self.held = {v: self.held[v] for v in sorted(self.held)[-2:]}

    @AWAKE
    @rule(purpose=st.sampled_from(["publish", "save"]), fails=st.booleans())
    def let_out(self, purpose: str, fails: bool) -> None:
        assert self.worker is not None
        machine = self.worker.machine
        self.publishes += 1
        quorum = self.worker.quorum(f"p{self.publishes}")
        try:
            with machine.publishing(quorum) if purpose == "publish" else machine.saving(quorum) as permit:
                permit.require(purpose)  # type: ignore[arg-type]
                assert permit.weights.version == self.version
                assert bytes_of(self.worker.model) == self.actor
                if fails:
                    raise Injected
        except Injected:
            pass

    @AWAKE
    @rule()
    def sleep(self) -> None:
        assert self.worker is not None
        self.worker.machine.sleep()
        self.asleep = True

    @precondition(lambda self: self.asleep)
    @rule()
    def wake(self) -> None:
        assert self.worker is not None
        self.worker.machine.wake()
        self.asleep = False

    @precondition(lambda self: self.asleep or self.dead)
    @rule(what=st.sampled_from(["step", "borrow", "snapshot", "agree", "sleep"]))
    def nothing_works_on_a_sleeper_or_a_poisoned_one(self, what: str) -> None:
        assert self.worker is not None
        machine = self.worker.machine
        try:
            match what:
                case "step":
                    machine.step(self.version).__enter__()
                case "borrow":
                    machine.borrow(Slot.REF).__enter__()
                case "snapshot":
                    machine.snapshot(Slot.REF)
                case "agree":
                    agree([machine.attest()], "never")
                case "sleep":
                    machine.sleep()
        except (InvariantViolation, GangDisagreement):
            return
        raise AssertionError(f"{what} worked in state {machine.state}")

    @precondition(lambda self: self.dead)
    @rule()
    def what_the_optimizer_wrote_cannot_be_healed(self) -> None:
        assert self.worker is not None
        try:
            self.worker.machine.heal()
        except InvariantViolation:
            return
        raise AssertionError("healed")

    @invariant()
    def the_actor_is_who_it_was(self) -> None:
        if self.worker is None:
            return
        worker = self.worker
        if self.dead:
            assert worker.machine.state == "poisoned"
        elif self.asleep:
            assert worker.machine.state == "asleep"
        else:
            assert worker.machine.state == "resident.actor"
            assert bytes_of(worker.model) == self.actor
            assert worker.machine.record(Slot.ACTOR).version == self.version
            assert all(torch.equal(m, self.masters[n]) for n, m in worker.masters.masters.items())
            assert worker.masters.master_mismatches() == []

    def teardown(self) -> None:
        if self.worker is not None:
            notes = Notes()
            replay_rank(read_file(self.directory / "journal" / "actor-0.jsonl", notes), notes)
            assert notes.findings == []
            shutil.rmtree(self.directory)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
