"""Scenarios of engines that are published to, and of runs that are continued. See `scenarios.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.resume import continuity, resuming
from orchestrator.resume.slot_plan import auxiliary
from state import saves
from state.checkpoints import Inventory
from state.continuity import Probe
from state.resume import LoadSpec, ResumeRequest, plan_resume
from state.slots import Slot
from tests.orchestrator.saved_checkpoint import DATA, marker
from tests.orchestrator.valid_config import with_flags
from tests.prove import toy_publish
from tests.prove.scenarios import CHANGING, ended
from tests.state.toy_run import ToyRun

# ---- engines -------------------------------------------------------------------------------------------------------


def real_publish(directory: Path, engines: type[toy_publish.Engines]) -> None:
    run = ToyRun(directory)

    def publish() -> None:
        run.engines.clear()
        fleet = engines(run.fleet, torn=("run/engine/1",))
        toy_publish.publisher(run, fleet).publish("publish-1-1")

    ended(run, run.begin, publish)


def an_engine_that_holds_something_else(directory: Path) -> None:
    real_publish(directory, toy_publish.Engines)


def every_engine_committed(directory: Path) -> None:
    """Whatever it proved."""
    real_publish(directory, toy_publish.CommitsAll)


def an_engine_that_wakes(directory: Path) -> None:
    run = ToyRun(directory)
    sleep, wake = (lambda: run.engines["engine-0"].sleep()), (lambda: run.engines["engine-0"].wake())
    ended(run, run.begin, run.publish, sleep, wake)


# ---- starts --------------------------------------------------------------------------------------------------------


def release(directory: Path) -> None:
    """From converted weights alone."""
    root = str(directory / "converted")
    inventory = Inventory(root, exists=True, tracker="release", has_release=True)
    run = ToyRun(directory, resumed=plan_resume(ResumeRequest(root, LoadSpec.random()), inventory))
    run.start = run.plan().start_rollout_id
    ended(run, run.begin, lambda: run.rollouts(2))


def resumed(directory: Path, second: Callable[[Config, Any], ToyRun]) -> None:
    """A run with a refreshed reference is saved and ends; `second` is made of the configuration and the new plan."""
    first = ToyRun(directory, kept=CHANGING)
    ended(first, first.begin, lambda: first.rollouts(2, save_after=(1,)))
    saved = next(entry for entry in first.driver.recent() if entry["kind"] == "save")
    root = saves.begin(directory / "checkpoints", 1)
    saves.write_data(root, DATA)
    saves.write_probe(root, PROBE)
    held = {"digest": saved["digest"], "slots": saved["slots"], "dtype": "float32"}
    saves.commit(directory / "checkpoints", 1, marker(with_flags(directory)) | held, None)
    flags = ("--checkpoint.load", str(directory / "checkpoints"), "--ref.update_interval", "2")
    flags += ("--loop.mode", "async", "--algorithm.old_logprobs", "old_actor", "--model.dtype", "float32")
    config = with_flags(directory, *flags)
    run = second(config, resuming.plan(config))
    ended(run, run.begin, lambda: confirm(run, config), lambda: run.rollouts(4))


PROBE = Probe("float32", (-1.0,), (-1.1,), 0.5, 3, (0.1, 0.1))


def confirm(run: ToyRun, config: Config) -> None:
    """As a live run does."""
    quorum = run.agree(f"resume-{run.incarnation}", with_kept=True)
    expected = continuity.expected(config, run.plan())[Slot.ACTOR]
    jumps = continuity.confirm(expected, quorum, lambda: PROBE)
    held = {"actor": quorum.digest} | {f"{kept.slot}@{kept.version}": kept.digest for kept in quorum.kept}
    about = {"paths": [str(expected.directory)], "same_dtype": expected.digest is not None, "held": held}
    run.driver.append("continuity", incarnation=run.incarnation, **about, jumps=list(jumps))


def refreshed_and_resumed(directory: Path) -> None:
    """Filled by the plan that a start makes."""

    def second(config: Config, plan: Any) -> ToyRun:
        loaded = tuple((one.slot, one.version) for one in auxiliary(config, plan))
        return ToyRun(directory, incarnation=2, start=2, kept=CHANGING, loaded=loaded, resumed=plan)

    resumed(directory, second)


class Rotten(ToyRun):
    """Reads something else than was written to the reference's file."""

    def filling(self, slot: Slot, version: int) -> float:
        return 99 if slot is Slot.REF else super().filling(slot, version)


def a_reference_that_rotted(directory: Path) -> None:
    def second(config: Config, plan: Any) -> ToyRun:
        loaded = tuple((one.slot, one.version) for one in auxiliary(config, plan))
        return Rotten(directory, incarnation=2, start=2, kept=CHANGING, loaded=loaded, resumed=plan)

    resumed(directory, second)
