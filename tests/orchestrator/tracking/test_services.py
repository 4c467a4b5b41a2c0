"""TensorBoard and W&B: real files, read back; one run over resumes; and no harm to a run, whatever they do."""

from __future__ import annotations

import io
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from orchestrator.checks.surroundings import Surroundings, problems
from orchestrator.tracking import weights_and_biases
from orchestrator.tracking.base import scalars
from orchestrator.tracking.opening import open_trackers
from orchestrator.tracking.tensorboard import TensorBoardTracker
from orchestrator.tracking.tolerant import Tolerant
from orchestrator.tracking.weights_and_biases import RUN_ID_FILE, WandbTracker
from tests.orchestrator.valid_config import with_flags

REPOSITORY = Path(__file__).parents[3]
OFFLINE = ("--tracking.wandb.mode", "offline")


@pytest.fixture(autouse=True)
def no_wandb_of_mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    yield
    wandb.teardown()


def scalar_points(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def wandb_records(run_dir: Path) -> list[Record]:
    """Of all offline files, in the order in which they were begun.

    They are LevelDB logs: blocks of 32 KiB, in which each piece of a record has a checksum, its length and its kind
    (1: whole, 2 to 4: begins, goes on, ends); seven bytes of W&B's own stand before the first.
    """
    found = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        content, position, data = path.read_bytes(), 7, b""
        while position + 7 <= len(content):
            length, kind = struct.unpack_from("<HB", content, position + 4)
            data += content[position + 7 : position + 7 + length]
            position += 7 + length
            if position % 32768 > 32768 - 7:
                position += -position % 32768
            if kind in (1, 4):
                found.append(Record.FromString(data))
                data = b""
    return found


def steps_of(records: list[Record]) -> list[dict[str, str]]:
    """What was logged, as JSON, less what W&B adds of its own."""
    rows = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
    named = [{item.key or ".".join(item.nested_key): item.value_json for item in row} for row in rows]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in named]


def test_what_was_not_measured_is_left_out_and_never_zero() -> None:
    metrics = {"a": 1, "b": 0.5, "c": None, "d": math.nan, "e": [1.0, None], "f": "words", "g": math.inf, "h": []}
    assert scalars(metrics) == {"a": 1, "b": 0.5}


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.log(0, {"reward/mean": 0.25, "unmeasured": None})
    tracker.log(1, {"reward/mean": 0.5, "eval/reward/mean": math.nan, "samples": ["a", None]})
    assert scalar_points(tmp_path, "reward/mean") == [(0, 0.25), (1, 0.5)], "on the disk before it is closed"
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_tensorboard_shows_a_step_that_ran_again_once(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path, 0)
    for step in range(4):
        first.log(step, {"reward/mean": 0.0})
    first.close()
    second = TensorBoardTracker(tmp_path, 2)
    second.log(2, {"reward/mean": 1.0})
    second.close()
    assert scalar_points(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.0), (2, 1.0)]


@pytest.mark.prove
def test_wandb_has_one_run_over_resumes_on_one_axis(tmp_path: Path) -> None:
    config, records = with_flags(tmp_path, *OFFLINE), []
    for steps in ((0, 1, 2), (1, 2, 3)):  # the second start continues from a checkpoint of step 0
        tracker = WandbTracker(config, tmp_path)
        for step in steps:
            tracker.log(step, {"reward/mean": step / 4, "unmeasured": None})
        tracker.close()
        wandb.teardown()  # as at the end of the process; what is written is then on the disk
        records += wandb_records(tmp_path)  # its directory is named by the second, so the next one may be the same
        shutil.rmtree(tmp_path / "wandb")

    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(tmp_path / RUN_ID_FILE).read_text().strip()}
    assert {run.display_name for run in runs} == {"test"}
    assert [row["rollout"] for row in steps_of(records)] == ["0", "1", "2", "1", "2", "3"]
    assert all(set(row) == {"rollout", "reward/mean"} for row in steps_of(records))
    axes = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert {(m.glob_name, m.step_metric) for m in axes if m.glob_name} == {("*", "rollout")}


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert weights_and_biases.run_id(tmp_path / "a") != weights_and_biases.run_id(tmp_path / "b")


def test_offline_asks_for_no_login_and_disabled_does_not_even_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "login", lambda **_: pytest.fail("login was called"))
    WandbTracker(with_flags(tmp_path, *OFFLINE), tmp_path).close()

    monkeypatch.delitem(sys.modules, "orchestrator.tracking.weights_and_biases")
    steps, evals = open_trackers(with_flags(tmp_path), 0, tmp_path / "run", Console(file=io.StringIO()))
    steps.close()
    evals.close()
    assert "orchestrator.tracking.weights_and_biases" not in sys.modules
    assert not (tmp_path / "run" / RUN_ID_FILE).exists()


def test_online_without_a_login_is_a_warning_and_never_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    said = io.StringIO()
    config = with_flags(tmp_path, "--tracking.wandb.mode", "online")
    steps, evals = open_trackers(config, 0, tmp_path / "run", Console(file=said, width=500))
    steps.log(0, {"reward/mean": 0.5})
    evals.log(1, {"eval/reward/mean": 0.5})
    steps.close()
    evals.close()
    assert said.getvalue().count("warning: W&B cannot be opened; the run goes on without it: NotLoggedIn") == 1
    assert "warning: W&B failed 3 times in this run" in said.getvalue()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


class Broken:
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise OSError("disk full")


def test_a_failing_tracker_is_said_once_and_counted() -> None:
    said: list[str] = []
    tracker = Tolerant("X", Broken, said.append)
    for step in range(5):
        tracker.log(step, {"a": 1})
    tracker.close()
    tracker.close()
    assert said == [
        "warning: X failed at step 0; the run goes on, and further failures are only counted: "
        "ConnectionError: no route",
        "warning: X failed 6 times in this run",
    ]


def test_a_tracker_that_hangs_at_the_end_is_left_behind() -> None:
    class Hanging(Broken):
        def close(self) -> None:
            threading.Event().wait()

    said: list[str] = []
    Tolerant("X", Hanging, said.append, close_timeout_s=0.05).close()
    assert said[0] == "warning: X is left behind: TimeoutError: not closed within 0.05 s"


TAIL = """
import io, os, psutil, signal, sys
from pathlib import Path
from rich.console import Console
from orchestrator.running.interrupts import raise_on_sigterm
from orchestrator.options.load import load
from orchestrator.tracking.opening import open_trackers
from contextlib import ExitStack
config = load(sys.argv[1], ["--tracking.wandb.mode", "offline", "--tracking.tensorboard"])
with ExitStack() as undo:
    steps, evals = open_trackers(config, 0, Path(sys.argv[2]), Console())
    undo.callback(steps.close)
    undo.callback(evals.close)
    raise_on_sigterm()
    for step in range(3):
        steps.log(step, {"reward/mean": step / 4})
        if step == {"sigterm to all": 1, "sigterm after the last step": 2}.get(sys.argv[3]):  # the children end first
            children = psutil.Process().children(recursive=True)
            for child in children:
                child.terminate()
            psutil.wait_procs(children, 20)
    if sys.argv[3] == "error":
        raise RuntimeError("as a failing worker would")
    if sys.argv[3].startswith("sigterm"):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.prove
# `ray job stop` signals the driver's children too, W&B's process among them.
@pytest.mark.parametrize("how", ["done", "error", "sigterm to all", "sigterm after the last step"])
def test_the_last_step_is_there_however_the_run_ends(tmp_path: Path, how: str) -> None:
    with_flags(tmp_path)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", TAIL, str(tmp_path / "valid.yaml"), str(run_dir), how]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode == 0) == (how == "done"), ended.stderr
    assert "warning" not in ended.stdout + ended.stderr
    written = [row["rollout"] for row in steps_of(wandb_records(run_dir))]
    assert written[-3:] == ["0", "1", "2"]
    assert set(written) == {"0", "1", "2"}
    assert scalar_points(run_dir / "tensorboard", "reward/mean")[-1] == (2, 0.5)
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("flags", "key"), [(OFFLINE, "tracking.wandb.mode"), (("--tracking.tensorboard",), "tracking.tensorboard")]
)
def test_a_missing_package_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], key: str
) -> None:
    monkeypatch.setattr("orchestrator.checks.surroundings.find_spec", lambda name: None)
    (problem,) = problems(with_flags(tmp_path, *flags), Surroundings(in_ray_job=False, on_one_machine=False))
    assert problem.key == key
    assert 'pip install "slotwise[' in problem.message
