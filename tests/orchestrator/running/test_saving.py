"""Saves in the background: the tracker moves when every rank has written, and never where one could not."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.running.interrupts import Stop
from orchestrator.running.live_run import LiveRun
from orchestrator.running.run_dir import RunDir
from orchestrator.running.saving import Saving
from orchestrator.waiting import WorkerFailed
from state import checkpoints, saves
from state.continuity import Probe
from state.journal import Journal
from state.slots import Slot, WeightId
from tests.orchestrator.valid_config import with_flags

PROBE = Probe("float32", (-1.0,), (-1.0,), 0.5, 3, (0.1, 0.1))


class Gang:
    """Ranks whose disks are as slow as the test likes: `on_disk` is set when all have written. `fails` with that."""

    def __init__(self, role: str = "actor") -> None:
        self.role = role
        self.on_disk = threading.Event()
        self.waited_for = threading.Event()
        self.fails: Exception | None = None
        self.saves: list[tuple[str, bool]] = []
        self.verbs: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        return lambda *arguments: self.verbs.append(verb)

    def asleep(self) -> bool:
        return [verb for verb in self.verbs if verb in ("sleep", "wake")][-1:] == ["sleep"]

    def probe(self) -> Probe:
        self.verbs.append("probe")
        return PROBE

    def agree(self, publish_id: str, *, with_kept: bool = False) -> Any:
        weights = WeightId(1, int(publish_id.split("-")[-1]) + 1)
        return SimpleNamespace(
            publish_id=publish_id, role=self.role, weights=weights, slot=Slot(self.role), digest="d", tensors=(),
            transitions=(1,), summaries=("s",), kept=(),
        )  # fmt: skip

    def save(self, quorum: Any, path: str, *, background: bool) -> None:
        self.verbs.append("save")
        self.saves.append((quorum.publish_id, background))
        (Path(path) / "weights").write_text(quorum.publish_id)

    def finish_save(self, publish_id: str) -> None:
        self.waited_for.set()
        assert self.on_disk.wait(30)
        if self.fails is not None:
            raise self.fails


class Gangs:
    """The verbs of a run's gangs that are not one gang's."""

    def __init__(self, actor: Gang, critic: Gang | None) -> None:
        self.actor, self.critic = actor, critic
        self.all = (actor,) if critic is None else (critic, actor)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.actor, verb)


class Run:
    """A `Saving` with such gangs, and what stands in its directory."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.root = directory / "ckpt"
        saving = ("--checkpoint.save_interval", "1", "--checkpoint.save", str(self.root))
        self.config = with_flags(directory, *saving, *flags)
        self.gang: Any = Gang()
        self.critic: Any = Gang("critic") if self.config.algorithm.needs_critic else None
        self.gangs: Any = Gangs(self.gang, self.critic)
        self.journal = Journal(directory / "driver.jsonl", "driver")
        self.run_dir = RunDir(directory, 1, self.journal)
        self.saving = Saving(self.config, self.run_dir, self.gangs)

    @property
    def tracker(self) -> str | None:
        return checkpoints.inspect(self.root).tracker

    @property
    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.journal.recent()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, "--checkpoint.async_save", "--checkpoint.keep", "1")


def test_it_is_complete_once_every_rank_has_written(run: Run) -> None:
    run.saving.save(0, {"cursor": 0})
    assert run.gang.saves == [("save-1-0", True)]
    assert run.saving.check() == {}
    assert (run.tracker, run.kinds) == (None, ["save_begun"])
    assert [str(one) for one in checkpoints.inspect(run.root).incomplete] == ["iter_0000000 (the save was cut off)"]
    run.gang.on_disk.set()
    assert run.saving.finish().keys() == {"perf/background_save_s"}
    assert (run.tracker, run.kinds) == ("0\n", ["save_begun", "save"])
    assert checkpoints.read_marker(checkpoints.iteration_dir(run.root, 0)).iteration == 0
    begun, saved = run.journal.recent()
    own = ("seq", "at", "kind")
    assert {k: v for k, v in begun.items() if k not in own} == {k: v for k, v in saved.items() if k not in own}


def test_the_next_save_waits_for_it_and_retention_comes_after_both(run: Run) -> None:
    run.saving.save(0, {})
    threading.Timer(0.05, run.gang.on_disk.set).start()
    assert "perf/background_save_s" in run.saving.save(1, {})
    assert run.kinds[:3] == ["save_begun", "save", "save_begun"]
    run.saving.finish()
    assert checkpoints.inspect(run.root).ours == (1,)
    assert run.tracker == "1\n"


def test_what_it_failed_of_is_raised_once_and_the_tracker_does_not_move(run: Run) -> None:
    run.gang.on_disk.set()
    run.saving.save(0, {})
    run.saving.finish()
    run.gang.fails = WorkerFailed("actor/1 failed to write to disk: No space left on device")
    run.saving.save(1, {})
    with pytest.raises(WorkerFailed, match="actor/1 failed to write to disk: No space left"):
        run.saving.finish()
    assert run.saving.finish() == {}
    assert (run.tracker, run.kinds[-1]) == ("0\n", "save_begun")
    assert checkpoints.inspect(run.root).ours == (0,)


def test_trainers_that_rest_are_woken_before_they_save(tmp_path: Path) -> None:
    run = Run(tmp_path, "--cluster.offload_train")
    nobody: Any = None
    manager: Any = SimpleNamespace(data_state=dict, generate=lambda rollout_id, weights: None)
    live = LiveRun(run.config, run.run_dir, run.gangs, manager, nobody, nobody, nobody, Stop(0.0), {})
    live._published = WeightId(1, 0)
    live.generate(0)
    live.save(0)
    live.save(1)
    assert run.gang.verbs == ["sleep", "wake", "probe", "save", "probe", "save"]


def test_a_run_hears_of_a_failure_after_the_rollout_that_it_came_in(run: Run) -> None:
    nobody: Any = None
    manager: Any = SimpleNamespace(data_state=dict)
    live = LiveRun(run.config, run.run_dir, run.gangs, manager, nobody, nobody, nobody, Stop(0.0), {})
    run.gang.fails = WorkerFailed("actor/1 failed to write to disk")
    live.save(0)
    live.may_stop()
    run.gang.on_disk.set()
    under_way = live._saving._under_way
    assert under_way is not None
    under_way._thread.join(30)
    with pytest.raises(WorkerFailed, match="actor/1"):
        live.may_stop()


def test_it_is_not_waited_for_without_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, "--checkpoint.async_save", "--train.timeout_s", "0.05")
    run.saving.save(0, {})
    with pytest.raises(WorkerFailed, match=r"save-1-0: not written within 0.05 s"):
        run.saving.save(1, {})
    assert run.gang.saves == [("save-1-0", True)]
    run.gang.on_disk.set()


def test_without_it_a_save_is_complete_when_it_returns(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saving.save(0, {})
    assert run.gang.saves == [("save-1-0", False)]
    assert (run.tracker, run.kinds) == ("0\n", ["save"])


PPO = ("--algorithm.advantage_estimator", "ppo")


def save_whole(run: Run, rollout_id: int) -> None:
    run.saving.save(rollout_id, {})
    run.saving.finish()


def standing(root: Path) -> tuple[str | None, tuple[int, ...]]:
    found = checkpoints.inspect(root)
    return found.tracker, found.ours


def test_a_critic_is_saved_beside_the_actor_and_never_into_its_directory(tmp_path: Path) -> None:
    run = Run(tmp_path, *PPO)
    run.saving.save(0, {"cursor": 3})
    beside = tmp_path / "ckpt-critic"
    assert standing(run.root) == standing(beside) == ("0\n", (0,))
    roles = [checkpoints.read_marker(checkpoints.iteration_dir(root, 0)).role for root in (run.root, beside)]
    assert roles == ["actor", "critic"]
    assert run.kinds == ["save", "save"]
    assert [entry["role"] for entry in run.journal.recent()] == ["critic", "actor"]


@pytest.mark.parametrize("background", [(), ("--checkpoint.async_save",)])
def test_killed_between_the_two_the_run_continues_from_what_both_have(
    tmp_path: Path, background: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, *PPO, "--checkpoint.keep", "1", *background)
    run.gang.on_disk.set()
    run.critic.on_disk.set()
    save_whole(run, 0)
    commit = saves.commit

    def killed(root: Path, *arguments: Any, **options: Any) -> None:
        if root == run.root:
            raise SystemExit("killed before the actor's commit")
        commit(root, *arguments, **options)

    monkeypatch.setattr(saves, "commit", killed)
    with pytest.raises(SystemExit):
        save_whole(run, 1)
    assert standing(run.root) == ("0\n", (0,))
    assert standing(tmp_path / "ckpt-critic") == ("1\n", (0, 1)), "what the actor continues from is kept"


def test_nothing_is_committed_before_the_ranks_of_both_have_written(tmp_path: Path) -> None:
    run = Run(tmp_path, *PPO, "--checkpoint.async_save")
    run.saving.save(0, {})
    run.critic.on_disk.set()
    assert run.gang.waited_for.wait(30)
    assert standing(tmp_path / "ckpt-critic") == (None, ())
    run.gang.on_disk.set()
    run.saving.finish()
    assert standing(run.root) == standing(tmp_path / "ckpt-critic") == ("0\n", (0,))


def test_retention_keeps_as_many_of_either(tmp_path: Path) -> None:
    run = Run(tmp_path, *PPO, "--checkpoint.keep", "2")
    for rollout_id in range(4):
        run.saving.save(rollout_id, {})
    assert standing(run.root) == standing(tmp_path / "ckpt-critic") == ("3\n", (2, 3))
