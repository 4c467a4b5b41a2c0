"""SlotMachine: the one place where residency changes.

    cold -> load … load -> ready        init: every slot is filled and recorded, the primary ends up live and verified
    with borrow(REF): …                 another slot computes; the primary is back afterwards, whatever happened
    with step(k): …                     the optimizer may write; on exit the new bytes have a version and a digest
    attest -> (agree) -> with publishing(quorum) | saving(quorum) as permit: …      bytes may leave

Each scope is two transitions of `residency.py` around some work. Anything that goes wrong in between ends in
`poisoned`, or provably where it began. `view()` reads one immutable value and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from state import lifecycle
from state.ambient import Ambient
from state.digest_records import ShardDigest
from state.errors import InvariantViolation, SlotwiseError
from state.gang import ActorPermit, Attestation, GangId, Kept, PermitVoid, Purpose, Quorum, mint_permit, why_void
from state.journal import Journal
from state.residency import Residency, reason
from state.slots import Provenance, Slot, SlotRecord, SlotView, WorkerId
from state.store import Key, NotHeld, SlotStore


class Poisoned(InvariantViolation):
    """Bytes were moving when an error came, or are not what was recorded: the live weights are not to be trusted."""


class NotFinite(SlotwiseError):
    """A step left weights that are no numbers. Another gang may do better, from before it."""


class MasterWeights(Protocol):
    """What the machine must know of the optimizer that trains the primary."""

    def finish_gather(self) -> None:
        """Complete any outstanding gather of updated parameters, so that live bytes are final."""

    def master_mismatches(self) -> list[str]:
        """Names of parameters whose master weights, cast to the model's dtype, differ from the live bytes."""


class NoOptimizer:
    """For workers that never train."""

    def finish_gather(self) -> None:
        return

    def master_mismatches(self) -> list[str]:
        return []


class StepScope:
    """Handed out by `step`: the trainer says when the optimizer is about to write."""

    def __init__(self) -> None:
        self.wrote = False

    def before_write(self) -> None:
        """Call right before parameters or optimizer state may change. From here on an error is fatal to the worker."""
        self.wrote = True


class SlotMachine:
    """Governs which slot is live on one worker. See the module's docstring for the shape of its use.

    `store` holds the bytes, `optimizer` the masters of the primary, `ambient` what a borrow must leave untouched.
    `keep_old_actors` bounds the ring of old_actor versions. `kept` are the slots beside the primary that change during
    a run, so that a checkpoint must hold them.
    """

    def __init__(
        self,
        store: SlotStore,
        *,
        worker: WorkerId,
        gang: GangId,
        journal: Journal,
        ambient: Ambient,
        primary: Slot = Slot.ACTOR,
        optimizer: MasterWeights | None = None,
        keep_old_actors: int = 1,
        kept: Collection[Slot] = (),
    ) -> None:
        self._store = store
        self._worker = worker
        self._gang = gang
        self._ambient = ambient
        self._primary = Key(primary)
        self._optimizer: MasterWeights = optimizer or NoOptimizer()
        self._keep_old_actors = keep_old_actors
        self._kept = frozenset(kept)
        self._records: dict[Key, tuple[SlotRecord, ShardDigest]] = {}
        self._spent: set[str] = set()
        self._ready = False
        self._permit: ActorPermit | None = None
        self._live = Residency(worker, gang, journal, primary)
        tiers = {slot: store.tier(slot) for slot in store.slots}
        self._live.note("created", slots=tiers, primary=primary, kept=sorted(self._kept))

    # ---- reading ---------------------------------------------------------------------------------------------

    def view(self) -> SlotView:
        """What is live right now. Never blocks, whatever the worker is doing."""
        return self._live.view

    def record(self, slot: Slot, version: int | None = None) -> SlotRecord:
        """What is recorded of a slot; `version` for old_actor."""
        return self._recorded(Key(slot, version))[0]

    @property
    def kept(self) -> tuple[SlotRecord, ...]:
        """What a checkpoint must hold beside the primary, as far as it is filled; the old_actor ring by version."""
        return tuple(self._records[key][0] for key in self._kept_keys())

    @property
    def primary(self) -> Slot:
        return self._primary.slot

    @property
    def state(self) -> str:
        return self._live.state

    # ---- filling ---------------------------------------------------------------------------------------------

    def load(self, slot: Slot, loader: Callable[[], object], provenance: Provenance, *, version: int = 0) -> SlotRecord:
        """Fill `slot`: `loader()` writes the live tensors. `version` is what its weights were trained for."""
        key = Key(slot, version if slot is Slot.OLD_ACTOR else None)
        tier = self._store.tier(slot)
        if key == self._primary and key in self._records and self._records[key][0].version > version:
            known = self._records[key][0].version
            self._live.refuse(f"load {slot}@{version}: it is at version {known}, which only grows")
        with self._live.moving("load", slot, provenance=str(provenance)):
            if key == self._primary:
                self._ready = False
            else:
                self._records.pop(key, None)  # its old bytes may be half overwritten when the loader fails
            self._store.begin_fill(key, self._primary)
            loader()
            self._store.end_fill(key, self._primary)
            digest = self._store.digest()
            record = SlotRecord(slot, version, digest.summary, provenance, tier)
            self._records[key] = (record, digest)
            self._live.fire("loaded", slot, record)
        return record

    def ready(self) -> None:
        """Last act of init: the primary is resident, its bytes are the recorded ones, and so are its masters."""
        record, digest = self._recorded(self._primary)
        if self._live.lent:
            self._live.refuse(f"ready {self.primary} inside a borrow")
        if not self._live.is_resident():
            self._switch(self._primary)
        live = self._must_hold(digest, f"init ended with other bytes than were loaded into {self.primary}")
        if wrong := self._optimizer.master_mismatches():
            named = f"{len(wrong)} parameters differ, among them {', '.join(wrong[:5])}"
            self._live.fail(f"the optimizer's master weights are not those of {self.primary}: {named}")
            raise Poisoned(f"{self._worker}: the optimizer's master weights are not those of {self.primary}: {named}")
        self._live.fire("ready", self.primary, record, live=live)
        self._ready = True

    def snapshot(self, slot: Slot) -> SlotRecord:
        """Fill `slot` (old_actor, or ref to refresh it) with the clean, resident actor. Live bytes do not move."""
        if slot is self.primary:
            self._live.refuse(f"snapshot {slot}: it is the primary itself")
        self._live.must_be_resident(f"snapshot {slot}")
        source, digest = self._recorded(self._primary)
        live = self._must_hold(digest, f"{self.primary} changed outside a step, no snapshot was taken of it")
        key = Key(slot, source.version if slot is Slot.OLD_ACTOR else None)
        record = SlotRecord(
            slot, source.version, source.digest, Provenance.snapshot(source.version), self._store.tier(slot)
        )
        self._store.snapshot(self._primary, key)
        self._records[key] = (record, digest)
        self._trim_ring()
        self._live.note("snapshot", slot=slot, version=source.version, digest=source.digest, live=live)
        return record

    # ---- using -----------------------------------------------------------------------------------------------

    @contextmanager
    def borrow(self, slot: Slot, version: int | None = None) -> Iterator[SlotRecord]:
        """Compute with another slot inside the scope. Parameters, buffers, mode and random state end as they began."""
        primary = self._recorded(self._primary)[0]
        if slot is self.primary or (slot is Slot.OLD_ACTOR and version == primary.version):
            self._live.must_be_resident(f"use {slot}")
            captured = self._ambient.capture()
            with self._live.lending():
                try:
                    yield primary
                finally:
                    self._ambient.restore(captured)
            return
        key = Key(slot, version)
        self._live.must_be_resident(f"borrow {key}")
        record = self._recorded(key)[0]
        captured = self._ambient.capture()
        with self._live.lending():
            self._switch(key)
            try:
                yield record
            finally:
                self._switch(self._primary)
                self._ambient.restore(captured)

    @contextmanager
    def step(self, rollout_id: int) -> Iterator[StepScope]:
        """Bracket all optimizer steps of one rollout. On exit the primary is at version `rollout_id + 1`.

        An error before `before_write()` leaves things provably as they were; one after it is fatal: masters have
        moved, and so are weights that are not finite. A rollout whose every step was skipped still counts.
        """
        before, digest = self._recorded(self._primary)
        if rollout_id + 1 <= before.version:
            self._live.refuse(f"train rollout {rollout_id}: {self.primary} is already at version {before.version}")
        self._must_be_ready(f"train rollout {rollout_id}")
        self._live.fire("step", self.primary, before, rollout_id=rollout_id)
        scope = StepScope()
        try:
            yield scope
            self._optimizer.finish_gather()
            after = self._store.digest()
            if not scope.wrote:
                self._must_equal(after, digest, f"{self.primary} changed in rollout {rollout_id}, and nobody wrote")
            self._must_be_finite(rollout_id)
        except BaseException as error:
            if not scope.wrote and self._is_still(digest) and self._has_its_masters():
                self._live.fire("unchanged", self.primary, before, wrote=scope.wrote, detail=reason(error))
            else:
                self._live.fail(reason(error))
            raise
        record = SlotRecord(self.primary, rollout_id + 1, after.summary, Provenance.step(rollout_id), before.tier)
        self._records[self._primary] = (record, after)
        self._store.forget(self._primary)
        self._live.fire("commit", self.primary, record, rollout_id=rollout_id, wrote=scope.wrote)

    # ---- letting bytes out -----------------------------------------------------------------------------------

    def attest(self, *, with_kept: bool = False) -> Attestation:
        """What this rank swears to: its record, its live bytes hashed now, and the number of its last transition.

        `with_kept`: also what a checkpoint must hold beside the primary, hashed where it rests.
        """
        view = self._live.view
        live = self._store.digest() if self._live.is_resident() else None
        if self._live.view.transition != view.transition:
            self._live.refuse("attest: a transition came in between")
        kept = self._attest_kept() if with_kept and live is not None else ()
        record = view.resident
        changed = live.differing(self._recorded(self._primary)[1]) if live is not None else ()
        self._live.note(
            "attested",
            transition=view.transition,
            state=view.state,
            slot=record.slot if record else None,
            version=record.version if record else None,
            digest=record.digest if record else None,
            live=live.summary if live else None,
            changed=changed[:5],
            kept=[
                {"slot": k.slot, "version": k.version, "digest": k.recorded, "live": k.resting.summary} for k in kept
            ],
        )
        return Attestation(
            worker=self._worker,
            gang=self._gang,
            state=view.state,
            slot=record.slot if record else None,
            version=record.version if record else None,
            live=live,
            recorded=record.digest if record else None,
            transition=view.transition,
            detail=view.detail,
            kept=kept,
            changed=changed,
        )

    def _attest_kept(self) -> tuple[Kept, ...]:
        attested = []
        for key in self._kept_keys():
            record = self._records[key][0]
            with self._reading(key):
                attested.append(Kept(record.slot, record.version, self._store.digest(), record.digest))
        return tuple(attested)

    def _kept_keys(self) -> list[Key]:
        return sorted((k for k in self._records if k.slot in self._kept), key=lambda k: (k.slot, k.version or 0))

    @contextmanager
    def publishing(self, quorum: Quorum) -> Iterator[ActorPermit]:
        """Inside, the agreed actor may be sent to engines. Void if this rank moved since it attested."""
        with self._permitted("publish", quorum) as permit:
            yield permit

    @contextmanager
    def saving(self, quorum: Quorum) -> Iterator[ActorPermit]:
        """Inside, the agreed primary may be written to a checkpoint. Void if this rank moved since it attested."""
        with self._permitted("save", quorum) as permit:
            yield permit

    @contextmanager
    def reading(self, permit: ActorPermit, slot: Slot, version: int | None = None) -> Iterator[SlotRecord]:
        """Inside `saving`: the live tensors stand for what the gang agreed to keep of another slot, where it rests.

        For the writer of a checkpoint. Nothing moves, and the primary is live again afterwards, whatever happened.
        """
        key = Key(slot, version if slot is Slot.OLD_ACTOR else None)
        what = f"save {key}"
        permit.require("save")
        self._live.must_be("saving", what)
        record = self._recorded(key)[0]
        agreed = {(k.slot, k.version): k.summaries[self._worker.rank] for k in permit.quorum.kept}
        if agreed.get((slot, record.version)) != record.digest:
            self._live.refuse(f"{what}: the quorum {permit.quorum.publish_id} is not about it as recorded", PermitVoid)
        self._live.note(
            "kept",
            publish_id=permit.quorum.publish_id,
            slot=slot,
            version=record.version,
            digest=record.digest,
        )
        with self._reading(key):
            yield record

    @contextmanager
    def _reading(self, key: Key) -> Iterator[None]:
        try:
            with self._store.reading(key):
                yield
        except BaseException as error:
            if not self._store.is_at_home(self._primary):
                if self._permit is not None:
                    self._permit.revoke()
                self._live.fail(reason(error))
            raise

    @contextmanager
    def _permitted(self, purpose: Purpose, quorum: Quorum) -> Iterator[ActorPermit]:
        record, digest = self._recorded(self._primary)
        with self._live.lock:
            self._must_be_ready(f"{purpose} with quorum {quorum.publish_id}")
            if objection := why_void(quorum, self._worker, self._gang, record, self._live.view.transition, self._spent):
                self._live.refuse(f"{purpose} with quorum {quorum.publish_id}: {objection}", PermitVoid)
            self._live.fire(purpose, self.primary, record, publish_id=quorum.publish_id)
            self._spent.add(quorum.publish_id)
        permit = self._permit = mint_permit(quorum, purpose)
        try:
            yield permit
        except BaseException as error:
            permit.revoke()
            if self._is_still(digest):
                self._live.fire("done", self.primary, record, publish_id=quorum.publish_id, detail=reason(error))
            else:
                self._live.fail(reason(error))
            raise
        permit.revoke()
        self._live.fire("done", self.primary, record, publish_id=quorum.publish_id)

    # ---- sleeping, healing -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the live bytes; the backing copy and the optimizer's state are the truth until `wake`."""
        record = self._recorded(self._primary)[0]
        self._live.fire("sleep", self.primary, record)
        try:
            self._store.release(self._primary)
        except BaseException:
            self.wake()
            raise

    def wake(self) -> None:
        """Bring back the primary, verified."""
        with self._live.moving("wake", self.primary):
            self._store.reclaim()
            self._bring(self._primary, verify=True)

    def heal(self) -> None:
        """From `poisoned`: restore the primary from its backing copy and verify it, where the poison allows that.

        After an error while loading or switching it does; once the optimizer has written, only a new gang helps.
        """
        poison = self._live.poison
        if poison is None or poison.origin not in lifecycle.RESTORABLE:
            found = "not poisoned" if poison is None else f"poisoned while {poison.origin}"
            self._live.refuse(f"heal: {found}", Poisoned)
        with self._live.moving("restore", self.primary):
            self._store.reclaim()
            self._bring(self._primary, verify=True)
            self._live.poison = None

    # ---- the only ways that residency changes ------------------------------------------------------------------

    def _switch(self, key: Key) -> None:
        with self._live.moving("switch", key.slot, version=key.version):
            self._bring(key)

    def _bring(self, key: Key, verify: bool = False) -> None:
        record, digest = self._recorded(key)
        moved = self._store.bring(key, self._primary)
        # Bytes that rest on the device do not move, but a stray write may have reached them since they were recorded.
        is_proven = not moved and not verify and key == self._primary
        live = None if is_proven else self._must_hold(digest, f"{key} came back as other bytes")
        self._live.fire("switched", key.slot, record, live=live)

    def _must_be_ready(self, what: str) -> None:
        if not self._ready:
            self._live.refuse(f"{what}: ready() has not verified {self.primary} since it was loaded")

    def _must_hold(self, digest: ShardDigest, complaint: str) -> str:
        """The live bytes are these, or the worker is poisoned. Returns what they are, for the journal to show."""
        return self._must_equal(self._store.digest(), digest, complaint)

    def _must_equal(self, live: ShardDigest, digest: ShardDigest, complaint: str) -> str:
        if live != digest:
            why = f"{complaint}: live {live.summary}, recorded {digest.summary}"
            self._live.fail(why, live=live.summary, recorded=digest.summary)
            raise Poisoned(f"{self._worker}: {why}")
        return live.summary

    def _must_be_finite(self, rollout_id: int) -> None:
        """Gradients are looked at before a step; what the optimizer makes of them can overflow all the same."""
        if wrong := self._store.not_finite():
            raise NotFinite(
                f"{self._worker}: after rollout {rollout_id} {len(wrong)} tensors hold values that are not finite, "
                f"among them {', '.join(wrong[:5])}; nothing of it is published or saved. Train with a smaller "
                "learning rate, or clip gradients (train.lr, train.clip_grad; of a critic critic.lr, critic.clip_grad)"
            )

    def _is_still(self, digest: ShardDigest) -> bool:
        """Whether the primary is live with provably these bytes. Bytes that cannot be hashed are not."""
        try:
            return self._store.is_at_home(self._primary) and self._store.digest() == digest
        except Exception:
            return False

    def _has_its_masters(self) -> bool:
        try:
            return not self._optimizer.master_mismatches()
        except Exception:
            return False

    def _recorded(self, key: Key) -> tuple[SlotRecord, ShardDigest]:
        if key not in self._records:
            known = ", ".join(sorted(map(str, self._records))) or "none"
            self._live.refuse(f"use {key}: it was never filled here; filled: {known}", NotHeld)
        return self._records[key]

    def _trim_ring(self) -> None:
        ring = sorted((k for k in self._records if k.slot is Slot.OLD_ACTOR), key=lambda k: k.version or 0)
        for key in ring[: max(0, len(ring) - self._keep_old_actors)]:
            self._store.forget(key)
            del self._records[key]
