"""One to three ranks, what may be asked of them, what can go wrong, and what must hold after each call.

The world keeps its own book of what every slot must hold (`Truth`), by other means than the machine: a value is what
the loader wrote or the optimizer made of it. After each call the machine's words are compared with the real numbers
and with the book.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from state.errors import InvariantViolation
from state.gang import GangDisagreement, PermitVoid, Quorum, agree
from state.residency import SlotViolation
from state.slots import Provenance, Slot, Tier
from state.store import Key, NotHeld
from tests.prove.faults import Faults, Injected
from tests.prove.toy_rank import OpenScope, Rank, RankState, digest_of

ACTOR, REF, OLD = Slot.ACTOR, Slot.REF, Slot.OLD_ACTOR
SCRIBBLE, STRAY = 77.0, 66.0

REFUSALS = (SlotViolation, PermitVoid, NotHeld, GangDisagreement)
MOVES = ("ready", "wake", "heal", "exit", "raise")
"""Calls that may find out, after bytes have moved, that there is nothing to go on with."""

Call = tuple[str, int, Any]
"""What is asked, of which rank, and more about it."""


@dataclass(frozen=True)
class Bounds:
    """How large the world is. `reload`: slots may be loaded again after init; `strays`: memory may be damaged."""

    ranks: int = 1
    tier: Tier = Tier.COPY
    versions: int = 2
    from_cold: bool = True
    strays: bool = True
    followed: str = ""
    """Calls to go on from, and to let fail, by name. Empty: all."""

    def follows(self, call: Call) -> bool:
        return not self.followed or call[0] in self.followed.split()


@dataclass(frozen=True)
class Truth:
    """What one rank's slots must hold. `lost`: the optimizer wrote and nothing was committed, so nothing is known."""

    version: int = 0
    values: tuple[tuple[Key, float], ...] = ()
    stray: bool = False
    lost: bool = False

    def value(self, key: Key) -> float | None:
        return dict(self.values).get(key)

    def holding(self, key: Key, value: float | None) -> Truth:
        held = dict(self.values)
        held.pop(key, None)
        if value is not None:
            held[key] = value
        return replace(self, values=tuple(sorted(held.items(), key=str)))


@dataclass
class Agreed:
    """The newest quorum, and what it was about by the book."""

    quorum: Quorum
    value: float


@dataclass
class Snapshot:
    """A state to come back to: one where no scope was open, and the calls since."""

    ranks: list[RankState]
    truths: list[Truth]
    agreed: Agreed | None
    publishes: int
    since: tuple[tuple[Call, int | None], ...] = ()


@dataclass
class World:
    bounds: Bounds
    faults: Faults = field(default_factory=Faults)
    ranks: list[Rank] = field(default_factory=list)
    truths: list[Truth] = field(default_factory=list)
    agreed: Agreed | None = None
    publishes: int = 0
    base: Snapshot = field(init=False)
    _left: str = ""

    def __post_init__(self) -> None:
        bounds = self.bounds
        tiers = {ACTOR: Tier.COPY, REF: bounds.tier, OLD: bounds.tier}
        self.ranks = [Rank(r, bounds.ranks, tiers, self.faults) for r in range(bounds.ranks)]
        self.truths = [Truth() for _ in self.ranks]
        self.base = self._now()
        if not bounds.from_cold:
            for rank in range(bounds.ranks):
                for call in (("load", rank, ACTOR), ("load", rank, REF), ("ready", rank, None)):
                    self.run(call)

    # ---- coming back ---------------------------------------------------------------------------------------------

    def _now(self) -> Snapshot:
        return Snapshot([r.save() for r in self.ranks], list(self.truths), self.agreed, self.publishes)

    def snapshot(self) -> Snapshot:
        return self.base

    def restore(self, snapshot: Snapshot) -> None:
        for rank, state in zip(self.ranks, snapshot.ranks, strict=True):
            if rank.scope is not None:
                rank.scope.abandon()
            rank.restore(state)
        self.truths, self.agreed, self.publishes = list(snapshot.truths), snapshot.agreed, snapshot.publishes
        self.base = replace(snapshot, since=())
        for call, fault in snapshot.since:
            self.run(call, fault)

    def key(self) -> tuple[Any, ...]:
        agreed: tuple[Any, ...] | None = None
        if self.agreed is not None:
            quorum = self.agreed.quorum
            valid = tuple(t == r.machine.view().transition for t, r in zip(quorum.transitions, self.ranks, strict=True))
            spent = tuple(quorum.publish_id in r.machine._spent for r in self.ranks)
            agreed = (quorum.weights.version, valid, spent, self.agreed.value, len(quorum.kept))
            if not any(valid):
                agreed = ("void",)
        return (tuple(r.key() for r in self.ranks), tuple(self.truths), agreed)

    def place(self) -> tuple[str, ...]:
        """Where every rank is, in the words of the table."""
        return tuple(r.machine.state + (f" in {r.scope.kind}" if r.scope else "") for r in self.ranks)

    # ---- what may be asked -----------------------------------------------------------------------------------------

    def calls(self) -> Iterator[Call]:
        for rank in self.ranks:
            at, truth = rank.rank, self.truths[rank.rank]
            yield from ((name, at, None) for name in ("ready", "sleep", "wake", "heal"))
            yield from (("load", at, slot) for slot in (ACTOR, REF))
            yield from (("snapshot", at, slot) for slot in (REF, OLD))
            if rank.scope is None or rank.machine.state != "resident.actor":
                yield ("borrow", at, Key(REF))
                yield from (("borrow", at, Key(OLD, v)) for v in {truth.version, max(0, truth.version - 1)})
            if truth.version < self.bounds.versions:
                yield ("step", at, truth.version)
            yield ("step", at, truth.version - 1)
            if self.agreed is not None:
                yield from (("publish", at, None), ("save", at, None))
            state = rank.machine.state
            if self.bounds.strays and rank.scope is None and not truth.stray and state == "resident.actor":
                yield ("stray", at, None)
            if rank.scope is not None:
                yield from ((name, at, None) for name in ("exit", "raise"))
                if rank.scope.kind != "step" or rank.masters.master < (truth.value(Key(ACTOR)) or 0) + 2:
                    yield from ((name, at, None) for name in INSIDE[rank.scope.kind])
                if rank.scope.kind == "borrow" and state.startswith("resident.") and state != "resident.actor":
                    yield ("scribble", at, None)
        yield ("agree", 0, False)
        yield ("agree", 0, True)

    # ---- asking ----------------------------------------------------------------------------------------------------

    def run(self, call: Call, fault: int | None = None) -> list[str]:
        """Make one call, with an error at the numbered point of it; returns the points that it passed."""
        before = self.key() if fault is None else None
        outcome: BaseException | None = None
        self.faults.arm(fault)
        try:
            with self.faults:
                getattr(self, f"_{call[0]}")(self.ranks[call[1]], call[2])
        except (Injected, InvariantViolation) as error:
            outcome = error
        seen, self.faults.seen = self.faults.seen, []
        self.faults.arm(None)
        self._settle(call, outcome)
        self._check()
        if before is not None and call[0] not in MOVES and isinstance(outcome, REFUSALS):
            assert self.key() == before, f"{call} was refused ({outcome}), and yet something changed"
        if any(rank.scope for rank in self.ranks):
            self.base = replace(self.base, since=(*self.base.since, (call, fault)))
        else:
            self.base = self._now()
        return seen

    def _load(self, rank: Rank, slot: Slot) -> None:
        value = self._to_load(rank, slot)

        def loader() -> None:
            for tensor in rank.numbers.tensors().values():
                self.faults.point("loader")
                tensor.fill_(value)
            if slot is ACTOR:
                rank.masters.reload()
            self.faults.point("loader")

        rank.machine.load(slot, loader, Provenance.random(0), version=self._version_to_load(rank, slot))

    def _to_load(self, rank: Rank, slot: Slot) -> float:
        """Another value than the slot had, so that bytes of before are told from those of after."""
        if slot is REF:
            return 50.0 if self.truths[rank.rank].value(Key(REF)) != 50.0 else 51.0
        held = self.truths[rank.rank].value(Key(ACTOR))
        return 1.0 + self.truths[rank.rank].version + (0.5 if held is not None and held % 1 == 0 else 0.0)

    def _version_to_load(self, rank: Rank, slot: Slot) -> int:
        return self.truths[rank.rank].version if slot is ACTOR else 0

    def _ready(self, rank: Rank, _: None) -> None:
        rank.machine.ready()
        assert rank.machine.state == "resident.actor", "I1: init ended elsewhere"
        assert rank.masters.master == self.truths[rank.rank].value(Key(ACTOR)), "I1: masters of other weights"

    def _sleep(self, rank: Rank, _: None) -> None:
        rank.machine.sleep()
        assert rank.numbers.values() is None, "asleep, and nothing was released"

    def _wake(self, rank: Rank, _: None) -> None:
        rank.machine.wake()

    def _heal(self, rank: Rank, _: None) -> None:
        rank.machine.heal()
        assert not self.truths[rank.rank].lost, "I5: a worker whose optimizer had written was healed"

    def _snapshot(self, rank: Rank, slot: Slot) -> None:
        rank.machine.snapshot(slot)

    def _borrow(self, rank: Rank, key: Key) -> None:
        manager = rank.machine.borrow(key.slot, key.version)
        before = (rank.numbers.values(), rank.masters.master, rank.ambient.now)
        record = manager.__enter__()
        rank.scope = OpenScope("borrow", manager, before)
        if key.slot is OLD:
            assert record.version == key.version, "I9: another version was borrowed"
            values = rank.numbers.values()
            truth = self.truths[rank.rank]
            now = Key(ACTOR) if key.version == truth.version else key
            assert truth.stray or values == (truth.value(now),) * 3, f"I9: {key} computes with {values}"

    def _step(self, rank: Rank, rollout_id: int) -> None:
        manager = rank.machine.step(rollout_id)
        before = (rank.numbers.values(), rank.masters.master, rank.ambient.now)
        handle = manager.__enter__()
        rank.scope = OpenScope("step", manager, before, handle)

    def _write(self, rank: Rank, _: None) -> None:
        """An optimizer step."""
        assert rank.scope is not None
        rank.scope.handle.before_write()
        rank.masters.step(gather=True)

    def _write_late(self, rank: Rank, _: None) -> None:
        """An optimizer step whose parameters are gathered later."""
        assert rank.scope is not None
        rank.scope.handle.before_write()
        rank.masters.step(gather=False)

    def _write_silently(self, rank: Rank, _: None) -> None:
        """A trainer that forgets to say that it writes."""
        rank.masters.step(gather=True)

    def _scribble(self, rank: Rank, _: None) -> None:
        """The body of a borrow writes into the slot, and changes mode and random state."""
        assert rank.scope is not None
        resident = rank.machine.view().resident
        assert resident is not None
        rank.scope.scribbled = Key(resident.slot, resident.version if resident.slot is OLD else None)
        rank.ambient.now = 1
        for tensor in rank.numbers.tensors().values():
            tensor.fill_(SCRIBBLE)

    def _publish(self, rank: Rank, _: None) -> None:
        self._let_out(rank, "publish", rank.machine.publishing(self._quorum()))

    def _save(self, rank: Rank, _: None) -> None:
        self._let_out(rank, "save", rank.machine.saving(self._quorum()))

    def _let_out(self, rank: Rank, kind: str, manager: AbstractContextManager[Any]) -> None:
        before = (rank.numbers.values(), rank.masters.master, rank.ambient.now)
        rank.permit = manager.__enter__()
        rank.scope = OpenScope(kind, manager, before)

    def _quorum(self) -> Quorum:
        assert self.agreed is not None
        return self.agreed.quorum

    def _send(self, rank: Rank, _: None) -> None:
        """Two buckets leave for an engine."""
        for names in (("up",), ("norm", "seen")):
            self.faults.point("bucket")
            self._bytes_leave(rank, "publish", names)

    def _store(self, rank: Rank, _: None) -> None:
        """A checkpoint is written: the primary, and what is kept beside it."""
        self.faults.point("write")
        self._bytes_leave(rank, "save", ("up", "norm", "seen"))
        assert rank.permit is not None
        for kept in rank.permit.quorum.kept:
            with rank.machine.reading(rank.permit, kept.slot) as record:
                self.faults.point("write kept")
                values = rank.numbers.values()
                expected = self.truths[rank.rank].value(Key(record.slot))
                assert values == (expected,) * 3, f"I2: {values} were saved as {kept.slot}, which holds {expected}"
        self.faults.point("written")

    def _bytes_leave(self, rank: Rank, purpose: str, names: tuple[str, ...]) -> None:
        assert rank.permit is not None
        rank.permit.require(purpose)  # type: ignore[arg-type]
        about = self.agreed
        assert about is not None
        values = {float(rank.numbers.tensors()[name][0]) for name in names}
        truth = self.truths[rank.rank]
        assert not truth.stray, "I2: damaged bytes left"
        assert rank.permit.quorum is about.quorum, "I2: bytes left with a quorum of before"
        assert values == {about.value}, f"I2: {values} left, agreed was {about.value}"
        assert about.quorum.weights.version == truth.version, "I2: bytes of another version left"

    def _stray(self, rank: Rank, _: None) -> None:
        """Something overwrites live memory outside of every scope."""
        rank.numbers.tensors()["norm"].fill_(STRAY)

    def _exit(self, rank: Rank, _: None) -> None:
        self._leave(rank, None)

    def _raise(self, rank: Rank, _: None) -> None:
        self._leave(rank, Injected("in the body"))

    def _leave(self, rank: Rank, error: Injected | None) -> None:
        scope, rank.scope = rank.scope, None
        assert scope is not None
        self._left = scope.kind
        scope.manager.__exit__(None if error is None else type(error), error, None)
        if scope.kind == "borrow" and rank.machine.state == "resident.actor" and not self.truths[rank.rank].stray:
            now = (rank.numbers.values(), rank.masters.master, rank.ambient.now)
            assert now == scope.before, f"I3: a borrow turned {scope.before} into {now}"

    def _agree(self, _: Rank, with_kept: bool) -> None:
        attestations = [rank.machine.attest(with_kept=with_kept) for rank in self.ranks]
        self.faults.point("agree")
        quorum = agree(attestations, f"p{self.publishes}")
        self.publishes += 1
        about = {(t.value(Key(ACTOR)), t.version, t.stray) for t in self.truths}
        assert len(about) == 1, f"I2: agreed, although by the book it is {about}"
        value, version, stray = next(iter(about))
        assert value is not None, "I2: agreed on nothing"
        assert not stray, "I2: agreed on damaged bytes"
        assert (quorum.slot, quorum.weights.version) == (ACTOR, version), "I2: agreed on something else"
        for rank in self.ranks:
            assert rank.machine.state == "resident.actor", "I2: a rank agreed that is elsewhere"
            assert rank.numbers.values() == (value,) * 3, "I2: a rank agreed that holds other bytes"
        self.agreed = Agreed(quorum, value)

    # ---- the book --------------------------------------------------------------------------------------------------

    def _settle(self, call: Call, outcome: BaseException | None) -> None:
        """What the call did, by the book. Where it failed at its very end, the record decides between old and new."""
        name, at, more = call
        rank, truth = self.ranks[at], self.truths[at]
        match name:
            case "load":
                key = Key(more)
                wanted = self._to_load(rank, more)
                if self._records(rank, key, wanted):
                    truth = truth.holding(key, wanted)
                    if more is ACTOR:
                        truth = replace(truth, stray=False)
                elif key not in rank.machine._records:
                    truth = truth.holding(key, None)
            case "snapshot":
                key = Key(more, truth.version if more is OLD else None)
                value = truth.value(Key(ACTOR))
                record = rank.machine._records.get(key)
                taken = record is not None and record[0].provenance.kind == "snapshot"
                if value is not None and taken and (outcome is None or self._records(rank, key, value)):
                    truth = truth.holding(key, value)
                for held, _ in truth.values:
                    if held.slot is OLD and held not in rank.machine._records:
                        truth = truth.holding(held, None)
            case "stray":
                truth = replace(truth, stray=rank.numbers.values() != (truth.value(Key(ACTOR)),) * 3)
            case "exit" | "raise" if self._left == "step":
                truth = self._after_step(rank, truth)
        if truth.stray and rank.numbers.values() == (truth.value(Key(ACTOR)),) * 3:
            truth = replace(truth, stray=False)
        self.truths[at] = truth

    def _after_step(self, rank: Rank, truth: Truth) -> Truth:
        version = rank.machine._records[Key(ACTOR)][0].version
        if version > truth.version:
            value = rank.masters.master
            assert version == truth.version + 1, "I7: a step made another version"
            if not truth.stray:
                assert self._records(rank, Key(ACTOR), value), "I4: committed before the parameters were gathered"
            truth = replace(truth.holding(Key(ACTOR), value), version=version)
        moved = rank.masters.master != truth.value(Key(ACTOR))
        return replace(truth, lost=truth.lost or moved)

    def _records(self, rank: Rank, key: Key, value: float) -> bool:
        known = rank.machine._records.get(key)
        return known is not None and known[1] == digest_of(rank.rank, len(self.ranks), value, value)

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for rank, truth in zip(self.ranks, self.truths, strict=True):
            self._check_rank(rank, truth)

    def _check_rank(self, rank: Rank, truth: Truth) -> None:
        machine, view = rank.machine, rank.machine.view()
        assert view.state == machine.state, "the view shows another state"
        if truth.lost:
            assert machine.state == "poisoned", "I5: the optimizer wrote, nothing was committed, and the worker goes on"
        if machine.state.startswith("resident."):
            assert view.resident is not None, "resident, and nobody is"
            assert machine.state == f"resident.{view.resident.slot}", "the view names another slot"
            key = Key(view.resident.slot, view.resident.version if view.resident.slot is OLD else None)
            scribbled = rank.scope is not None and rank.scope.scribbled == key
            if not scribbled and not (truth.stray and key == Key(ACTOR)):
                values, expected = rank.numbers.values(), truth.value(key)
                assert values == (expected,) * 3, f"I3: {machine.state} computes with {values}, {key} is {expected}"
            if key == Key(ACTOR):
                assert view.resident.version == truth.version, "I4: a trained version was lost"
                if machine._ready:
                    assert truth.stray or rank.masters.master == truth.value(key), "I1: masters of other weights"
            elif machine._ready and rank.scope is None:
                assert view.trigger == "loaded", f"I3: {key} is resident outside of a borrow"
        else:
            assert view.resident is None, f"{machine.state}, and {view.resident} is said to be resident"
        if machine.state in ("publishing", "saving") and rank.scope is not None:
            assert rank.scope.kind in ("publish", "save"), "bytes may leave outside of a scope"
        if rank.permit is not None and rank.scope is None:
            try:
                rank.permit.require(rank.permit.purpose)
            except PermitVoid:
                rank.permit = None
            else:
                raise AssertionError("I2: a permit outlived its scope")


INSIDE: dict[str, tuple[str, ...]] = {
    "borrow": (),
    "step": ("write", "write_late", "write_silently"),
    "publish": ("send",),
    "save": ("store",),
}
