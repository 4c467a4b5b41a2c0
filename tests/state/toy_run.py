"""A whole run without Ray: real slot machines of two ranks, real engine lives, and a driver loop that journals what
the real one does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from state.engine_life import EngineLife, EngineTransition
from state.errors import InvariantViolation
from state.gang import Quorum, agree
from state.journal import Journal
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot, Tier, WeightId
from tests.state.toy import ToyWorker, cold_worker

WORLD = 2
ENGINES = ("engine-0", "engine-1")


@dataclass
class ToyRun:
    """One incarnation, which continues from the iteration before `start`.

    `torn` names engines that turn out to hold something else than was published. `kept` are slots that change: the
    reference is what `refresh` made it, and each sample is trained on under the old_actor of the version that made it.
    `loaded` is what is filled beside the actor, in `tier`; `publish_every` after how many rollouts engines get another
    version; `split` over how many ranks the model is split: both hold all of it with 1. `amounts`: by rank, what a step
    adds to every weight. `resumed` is the plan, where it is not to continue from this run's own checkpoint.
    """

    directory: Path
    incarnation: int = 1
    start: int = 0
    torn: tuple[str, ...] = ()
    kept: tuple[Slot, ...] = ()
    loaded: tuple[tuple[Slot, int], ...] = ((Slot.REF, 0),)
    publish_every: int = 1
    split: int = WORLD
    tier: Tier = Tier.COPY
    amounts: tuple[float, ...] = (1.0,) * WORLD
    resumed: ResumePlan | None = None
    published: int = 0
    workers: list[ToyWorker] = field(default_factory=list)
    engines: dict[str, EngineLife] = field(default_factory=dict)
    publishes: int = 0

    def begin(self, verify: bool = True) -> None:
        self.driver = Journal(self.directory / "journal" / "driver.jsonl", "driver")
        self.fleet = Journal(self.directory / "journal" / "fleet.jsonl", "fleet")
        self.driver.append("driver_started", incarnation=self.incarnation, pid=1, start_rollout_id=None)
        self.engines = {name: EngineLife(name, self._record) for name in ENGINES}
        for life in self.engines.values():
            life.started()
        self._begin_gang(verify)

    def rebuilt(self, start: int) -> ToyRun:
        """The gang fails in the middle of a step; another one takes its place, and engines stay."""
        self.workers[0].machine.step(start).__enter__()
        about = {"ranks": {"actor/0": "died"}, "reason": "", "rebuild": True, "why": "1 of 3"}
        self.driver.append("gang_failed", incarnation=self.incarnation, **about)
        for life in self.engines.values():
            life.withdraw("the gang failed")
        following = ToyRun(self.directory, self.incarnation + 1, start, kept=self.kept, engines=self.engines)
        following.driver, following.fleet = self.driver, self.fleet
        self.driver.append("gang_rebuild", incarnation=following.incarnation)
        following._begin_gang()
        return following

    def _begin_gang(self, verify: bool = True) -> None:
        for rank in range(WORLD):
            place = {"rank": rank, "world_size": WORLD, "incarnation": self.incarnation, "split": self.split}
            options = {"kept": self.kept, "keep_old_actors": 2, "tier": self.tier}
            self.workers.append(cold_worker(self.directory, **place, **options))  # type: ignore[arg-type]
        for worker in self.workers:
            version = self.start if self.plan().load_optimizer else 0
            worker.load(Slot.ACTOR, 1 + version, version)
            for slot, version in self.loaded:
                worker.load(slot, self.filling(slot, version), version)
            if verify:
                worker.machine.ready()
        self.driver.append(
            "gang_started",
            role="actor",
            incarnation=self.incarnation,
            world_size=WORLD,
            config_hash="c0ffee",
            resume=self.plan().to_json(),
        )

    def filling(self, slot: Slot, version: int) -> float:
        """What every weight of a slot is that is loaded: an actor's of that version, or the first reference's."""
        return 20 if (slot, version) == (Slot.REF, 0) else 1 + version

    def confirm_resume(self) -> None:
        quorum = self.agree(f"resume-{self.incarnation}", with_kept=True)
        held = {"actor": quorum.digest} | {f"{k.slot}@{k.version}": k.digest for k in quorum.kept}
        directory = str(self.directory / "checkpoints" / f"iter_{self.start - 1:07d}")
        about = {"path": directory, "same_dtype": True, "held": held, "jumps": []}
        self.driver.append("continuity", incarnation=self.incarnation, **about)

    def plan(self) -> ResumePlan:
        if self.resumed is not None:
            return self.resumed
        if not self.start:
            return ResumePlan("fresh", LoadSpec.random(), 0, False, False, False, "nothing was saved")
        spec = LoadSpec(str(self.directory / "checkpoints"), self.start - 1, "native")
        return ResumePlan("native", spec, self.start, True, True, True, "the tracker says so")

    def rollouts(self, end: int, save_after: tuple[int, ...] = ()) -> None:
        self.publish()
        for rollout_id in range(self.start, end):
            self.train(rollout_id)
            if Slot.REF in self.kept and (rollout_id + 1) % 2 == 0:
                self.refresh()
            if rollout_id in save_after:
                self.save(rollout_id)
            if (rollout_id + 1) % self.publish_every == 0 or rollout_id + 1 == end:
                self.publish()

    def finish(self, outcome: str = "done") -> None:
        self.driver.append("run_ended", incarnation=self.incarnation, outcome=outcome)
        for life in self.engines.values():
            life.die("shut down")

    def train(self, rollout_id: int) -> None:
        """On samples of the version that was published last."""
        for worker, amount in zip(self.workers, self.amounts, strict=True):
            if any(slot is Slot.REF for slot, _ in self.loaded):
                with worker.machine.borrow(Slot.REF):
                    pass
            if Slot.OLD_ACTOR in self.kept:
                with worker.machine.borrow(Slot.OLD_ACTOR, self.published):
                    pass
            with worker.machine.step(rollout_id) as scope:
                scope.before_write()
                worker.masters.step(amount)
        self.driver.append(
            "trained",
            incarnation=self.incarnation,
            rollout_id=rollout_id,
            version=rollout_id + 1,
            behaviour=[self.published],
        )

    def refresh(self) -> None:
        for worker in self.workers:
            worker.machine.snapshot(Slot.REF)

    def agree(self, publish_id: str, with_kept: bool = False) -> Quorum:
        return agree([worker.machine.attest(with_kept=with_kept) for worker in self.workers], publish_id)

    def publish(self, fail: Callable[[], None] | None = None, quorum: Quorum | None = None) -> None:
        """`fail`: it breaks off on the way. `quorum`: one of before."""
        self.publishes += 1
        quorum = quorum or self.agree(f"publish-{self.incarnation}-{self.publishes}")
        scopes = [ExitStack() for _ in self.workers]
        try:
            for worker, scope in zip(self.workers, scopes, strict=True):
                scope.enter_context(worker.machine.publishing(quorum))
        except InvariantViolation as error:
            self._record_publish(quorum, "refused", {}, reason=str(error))
            for scope in scopes:
                scope.close()
            raise
        for life in self.engines.values():
            life.begin_update(quorum.publish_id, quorum.weights)
        if fail is not None:
            self._record_publish(quorum, "aborted", dict.fromkeys(ENGINES, "torn: Lost"), reason="Lost")
            for life in self.engines.values():
                life.abort("Lost")
        else:
            self._conclude(quorum)
        for scope in scopes:
            scope.close()
        self.published = quorum.weights.version
        for worker in self.workers if Slot.OLD_ACTOR in self.kept else ():
            worker.machine.snapshot(Slot.OLD_ACTOR)
        if fail is None:
            verdict = {e: "torn: norm.weight differs" if e in self.torn else "committed" for e in ENGINES}
            self._record_publish(quorum, "committed", verdict)

    def save(self, rollout_id: int) -> None:
        self._record_save("save", self._let_out(rollout_id), rollout_id)

    def begin_save(self, rollout_id: int) -> Quorum:
        """In the background: every rank has a copy."""
        quorum = self._let_out(rollout_id)
        self._record_save("save_begun", quorum, rollout_id)
        return quorum

    def complete_save(self, quorum: Quorum, rollout_id: int) -> None:
        """Every rank writes its copy, and the driver commits the whole."""
        for rank in range(WORLD):
            self.write_copy(quorum, rank)
        self._record_save("save", quorum, rollout_id)

    def write_copy(self, quorum: Quorum, rank: int) -> None:
        identity = {"role": "actor", "rank": rank, "incarnation": self.incarnation}
        self.workers[rank].journal.append("written", **identity, publish_id=quorum.publish_id, nbytes=8, seconds=0.1)

    def _let_out(self, rollout_id: int) -> Quorum:
        quorum = self.agree(f"save-{self.incarnation}-{rollout_id}", with_kept=True)
        for worker in self.workers:
            with worker.machine.saving(quorum) as permit:
                permit.require("save")
                for kept in worker.machine.kept:
                    with worker.machine.reading(permit, kept.slot, kept.version):
                        pass
        return quorum

    def _record_save(self, kind: str, quorum: Quorum, rollout_id: int) -> None:
        self.driver.append(
            kind,
            publish_id=quorum.publish_id,
            iteration=rollout_id,
            incarnation=self.incarnation,
            version=quorum.weights.version,
            digest=quorum.digest,
            transitions=quorum.transitions,
            summaries=quorum.summaries,
            slots=[
                {"slot": k.slot, "version": k.version, "digest": k.digest, "summaries": k.summaries}
                for k in quorum.kept
            ],
            path=str(self.directory / "checkpoints" / f"iter_{rollout_id:07d}"),
        )

    def _conclude(self, quorum: Quorum) -> None:
        for name, life in self.engines.items():
            held = "f" * 16 if name in self.torn else quorum.digest
            self.fleet.append("proof", engine=name, publish_id=quorum.publish_id, digest=held)
            if name in self.torn:
                life.abort("1 tensors differ: norm.weight")
            else:
                life.commit(quorum.publish_id, quorum.weights)

    def _record_publish(self, quorum: Quorum, outcome: str, engines: dict[str, str], **more: str) -> None:
        self.driver.append(
            "publish",
            publish_id=quorum.publish_id,
            outcome=outcome,
            slot=quorum.slot,
            incarnation=quorum.weights.incarnation,
            version=quorum.weights.version,
            digest=quorum.digest,
            world_size=len(quorum.transitions),
            transitions=quorum.transitions,
            summaries=quorum.summaries,
            replicas=quorum.replicas,
            engines=engines,
            **more,
        )

    def _record(self, step: EngineTransition) -> None:
        status = step.status
        weights: WeightId | None = status.weights
        self.fleet.append(
            "engine",
            engine=status.engine_id,
            transition=status.transition,
            trigger=step.trigger,
            before=step.source,
            state=status.phase,
            incarnation=weights.incarnation if weights else None,
            version=weights.version if weights else None,
            publish_id=status.publish_id,
            reason=status.reason,
        )


def whole_run(directory: Path) -> None:
    """Three rollouts with a save after the second; then a second start that resumes from it and trains one more."""
    first = ToyRun(directory)
    first.begin()
    first.rollouts(3, save_after=(1,))
    first.finish()
    second = ToyRun(directory, incarnation=2, start=2)
    second.begin()
    second.rollouts(3, save_after=(2,))
    second.finish()


def kept_run(directory: Path) -> None:
    """A reference that is refreshed, and engines that are a version behind every other rollout; saved after the second
    rollout and resumed from there."""
    kept = (Slot.REF, Slot.OLD_ACTOR)
    first = ToyRun(directory, kept=kept, publish_every=2)
    first.begin()
    first.rollouts(3, save_after=(1,))
    first.finish()
    loaded = ((Slot.REF, 2), (Slot.OLD_ACTOR, 0))
    second = ToyRun(directory, incarnation=2, start=2, kept=kept, loaded=loaded, publish_every=2)
    second.begin()
    second.confirm_resume()
    second.rollouts(4)
    second.finish()
