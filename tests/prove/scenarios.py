"""Small runs whose journals show a mutant, where it leaves a trace: what was asked, and by whom, is never the fault.

Each function writes a run directory, and ends as a run does: the first error that nobody expects fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from state.slots import Provenance, Slot, Tier
from state.store import Key
from tests.state.toy import ToyWorker, fill
from tests.state.toy_run import ToyRun
from tests.workers.gang_processes import run_gang

CHANGING = (Slot.REF, Slot.OLD_ACTOR)


def ended(run: ToyRun, *work: Callable[[], object]) -> None:
    """Do all of it, and end the run."""
    try:
        for one in work:
            one()
    except Exception:
        run.finish("failed")
    else:
        run.finish()


def first_of(run: ToyRun, work: Callable[[ToyWorker], object]) -> Callable[[], object]:
    """On rank 0, once it is there."""
    return lambda: work(run.workers[0])


def on_each(run: ToyRun, work: Callable[[ToyWorker], object]) -> Callable[[], object]:
    return lambda: [work(worker) for worker in run.workers]


# ---- whole runs ----------------------------------------------------------------------------------------------------


def plain(directory: Path) -> None:
    """Three rollouts and a save."""
    run = ToyRun(directory)
    ended(run, run.begin, lambda: run.rollouts(3, save_after=(1,)))


def on_the_device(directory: Path) -> None:
    run = ToyRun(directory, tier=Tier.DEVICE)
    ended(run, run.begin, lambda: run.rollouts(1))


def unverified(directory: Path) -> None:
    """Nobody ends init."""
    run = ToyRun(directory, loaded=())
    ended(run, lambda: run.begin(verify=False), lambda: run.rollouts(1))


# ---- what leaves ---------------------------------------------------------------------------------------------------


def a_stray_write(directory: Path) -> None:
    """Something overwrites, between two publishes, a tensor that no other rank holds a copy of."""
    run = ToyRun(directory)
    ended(run, run.begin, run.publish, first_of(run, lambda worker: worker.model.up.data.fill_(9)), run.publish)


def a_backup_of_strays(directory: Path) -> None:
    run = ToyRun(directory)
    ended(
        run,
        run.begin,
        run.publish,
        first_of(run, lambda worker: fill(worker.model, 9)),
        first_of(run, lambda worker: worker.machine.snapshot(Slot.OLD_ACTOR)),
    )


def moved_since(directory: Path) -> None:
    """Rank 0 scores between its attestation and the publish."""
    run = ToyRun(directory)

    def late() -> None:
        quorum = run.agree("publish-1-2")
        borrow(run.workers[0])
        run.publish(quorum=quorum)

    ended(run, run.begin, run.publish, late)


def another_version(directory: Path) -> None:
    """Rank 1 has trained a rollout more, which changed nothing."""
    run = ToyRun(directory)

    def train() -> None:
        with run.workers[1].machine.step(0) as scope:
            scope.before_write()

    ended(run, run.begin, train, run.publish)


def a_drifting_replica(directory: Path) -> None:
    """Two replicas of all of the model; rank 1 adds something else."""
    run = ToyRun(directory, split=1, amounts=(1.0, 2.0))
    ended(run, run.begin, lambda: run.rollouts(1))


def reference_loaded_again(directory: Path) -> None:
    """After init, and then it is published."""
    run = ToyRun(directory)
    ended(run, run.begin, run.publish, on_each(run, lambda worker: worker.load(Slot.REF, 30)), run.publish)


# ---- what is live --------------------------------------------------------------------------------------------------


def borrow(worker: ToyWorker) -> None:
    with worker.machine.borrow(Slot.REF):
        pass


def error_in_a_borrow(directory: Path) -> None:
    """And whoever catches it goes on to train."""
    run = ToyRun(directory)

    def fails(worker: ToyWorker) -> None:
        with suppress(ZeroDivisionError), worker.machine.borrow(Slot.REF):
            raise ZeroDivisionError
        with worker.machine.step(0) as scope:
            scope.before_write()
            worker.masters.step(1)

    ended(run, run.begin, run.publish, on_each(run, fails))


def broken_copy(directory: Path) -> None:
    """A copy breaks off half way; the worker is healed and publishes."""
    run = ToyRun(directory)

    def breaks(worker: ToyWorker) -> None:
        worker.store._backing[Key(Slot.REF)][1] = worker.store._backing[Key(Slot.REF)][1][:3]
        with suppress(RuntimeError):
            borrow(worker)
        worker.machine.heal()

    ended(run, run.begin, run.publish, first_of(run, breaks), run.publish)


def damaged_copy(directory: Path) -> None:
    """What rests in host memory is overwritten before it is borrowed."""
    run = ToyRun(directory)

    def damage(worker: ToyWorker) -> None:
        worker.store._backing[Key(Slot.REF)][0].fill_(7)

    ended(run, run.begin, run.publish, first_of(run, damage), first_of(run, borrow))


def a_copy_that_is_gone(directory: Path) -> None:
    run = ToyRun(directory)
    forget = first_of(run, lambda worker: worker.store.forget(Key(Slot.REF)))
    ended(run, run.begin, run.publish, forget, first_of(run, borrow))


def sleep_and_wake(directory: Path) -> None:
    run = ToyRun(directory)
    sleep = on_each(run, lambda worker: worker.machine.sleep())
    wake = on_each(run, lambda worker: worker.machine.wake())
    ended(run, run.begin, lambda: run.rollouts(1), sleep, wake, run.publish)


def sleep_beside_a_damaged_copy(directory: Path) -> None:
    run = ToyRun(directory)

    def rest(worker: ToyWorker) -> None:
        borrow(worker)
        worker.store._backing[Key(Slot.ACTOR)][0].fill_(7)
        worker.machine.sleep()
        worker.machine.wake()

    ended(run, run.begin, run.publish, first_of(run, rest))


def a_slot_that_is_none(directory: Path) -> None:
    run = ToyRun(directory)
    ended(run, run.begin, run.publish, first_of(run, lambda worker: worker.load(Slot.CRITIC, 5)))


def load_inside_a_borrow(directory: Path) -> None:
    run = ToyRun(directory)

    def load(worker: ToyWorker) -> None:
        with worker.machine.borrow(Slot.REF):
            worker.machine.load(Slot.TEACHER, lambda: fill(worker.model, 3), Provenance.random(3))

    ended(run, run.begin, run.publish, first_of(run, load))


def snapshot_inside_a_borrow(directory: Path) -> None:
    run = ToyRun(directory)

    def snapshot(worker: ToyWorker) -> None:
        with worker.machine.borrow(Slot.REF):
            worker.machine.snapshot(Slot.OLD_ACTOR)

    ended(run, run.begin, run.publish, first_of(run, snapshot))


# ---- steps ---------------------------------------------------------------------------------------------------------


def error_after_a_write(directory: Path) -> None:
    """Masters have moved, parameters not yet."""
    run = ToyRun(directory)

    def fails(worker: ToyWorker) -> None:
        with worker.machine.step(0) as scope:
            scope.before_write()
            worker.masters.masters = {name: master + 1 for name, master in worker.masters.masters.items()}
            raise ZeroDivisionError

    ended(run, run.begin, run.publish, first_of(run, fails))


def heal_after_a_step(directory: Path) -> None:
    run = ToyRun(directory)

    def fails(worker: ToyWorker) -> None:
        borrow(worker)
        with suppress(ZeroDivisionError), worker.machine.step(0) as scope:
            scope.before_write()
            worker.masters.step(1)
            raise ZeroDivisionError
        worker.machine.heal()

    ended(run, run.begin, run.publish, first_of(run, fails))


def a_late_gather(directory: Path) -> None:
    """Parameters are gathered after the step, as overlap_param_gather does."""
    run = ToyRun(directory)

    def train(worker: ToyWorker) -> None:
        with worker.machine.step(0) as scope:
            scope.before_write()
            worker.masters.outstanding = lambda: worker.masters.step(1)

    ended(run, run.begin, run.publish, on_each(run, train), run.publish)


def a_silent_write(directory: Path) -> None:
    """In a step, by somebody who does not say so."""
    run = ToyRun(directory)

    def train(worker: ToyWorker) -> None:
        with worker.machine.step(0):
            worker.masters.step(1)

    ended(run, run.begin, run.publish, first_of(run, train))


def trained_twice(directory: Path) -> None:
    run = ToyRun(directory)
    ended(run, run.begin, run.publish, lambda: run.train(0), lambda: run.train(0))


def late_samples(directory: Path) -> None:
    """Samples of version 0 are trained on when the ring has moved past it."""
    run = ToyRun(directory, kept=CHANGING)

    def train() -> None:
        run.published = 0
        run.train(3)

    ended(run, run.begin, lambda: run.rollouts(3), train)


def behaviour_policies(directory: Path) -> None:
    """A real rank through every loop and interval."""
    run_gang("tests.workers.behaviour_jobs:every_schedule", 1, (directory,), time_limit_s=120.0)
