"""Metrics: one JSON object per line, whatever the values are and whenever the process was killed."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from orchestrator.tracking.base import Trackers
from orchestrator.tracking.jsonl import JsonlTracker, Repair, repair
from orchestrator.tracking.progress import EvalTracker, ProgressTracker, line


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_each_step_is_an_object_on_a_line_of_its_own(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "new" / "metrics.jsonl", 0)
    tracker.log(0, {"reward/mean": 0.5})
    tracker.log(1, {"reward/mean": 0.75, "weights/version": "0.2"})
    tracker.close()
    assert records(tmp_path / "new" / "metrics.jsonl") == [
        {"step": 0, "reward/mean": 0.5},
        {"step": 1, "reward/mean": 0.75, "weights/version": "0.2"},
    ]


def test_a_line_can_be_read_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", 0)
    tracker.log(0, {"a": 1})
    assert records(tmp_path / "m.jsonl") == [{"step": 0, "a": 1}]
    tracker.close()


def test_the_last_line_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from orchestrator.tracking.jsonl import JsonlTracker;"
        "JsonlTracker(Path(sys.argv[1]), 0).log(7, {'a': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.jsonl")], cwd=root, env=os.environ, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert records(tmp_path / "m.jsonl") == [{"step": 7, "a": 1}]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, None),
        (math.inf, None),
        (None, None),
        (np.float32("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (True, True),
        ([1.0, None, math.nan], [1.0, None, None]),
        ({"a": -math.inf}, {"a": None}),
        ([], []),
    ],
)
def test_what_json_cannot_carry_becomes_null(tmp_path: Path, value: Any, written: Any) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", 0)
    tracker.log(0, {"a": value})
    tracker.close()
    assert records(tmp_path / "m.jsonl") == [{"step": 0, "a": written}]


def test_a_value_that_is_no_metric_is_refused_without_writing_half_a_line(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", 0)
    with pytest.raises(TypeError, match="object is no metric"):
        tracker.log(0, {"a": object()})
    tracker.log(1, {"a": 1})
    tracker.close()
    assert [record["step"] for record in records(tmp_path / "m.jsonl")] == [1]


def test_resuming_cuts_a_torn_line_and_drops_the_steps_that_run_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "rewa')
    tracker = JsonlTracker(path, 2)
    assert tracker.repaired == Repair(torn_bytes=17, later_lines=1)
    tracker.log(2, {"again": 1})
    tracker.close()
    assert records(path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": 1}]
    assert (tmp_path / "m.before.jsonl").read_text() == '{"step": 2}\n{"step": 3, "rewa\n'


def test_a_start_from_nothing_loses_no_line_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    for _ in range(2):
        JsonlTracker(path, 0).close()
    assert records(path) == []
    assert [record["step"] for record in records(tmp_path / "m.before.jsonl")] == [0, 1]


def test_every_cut_of_a_file_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    content = b'{"step": 0, "a": "\xc3\xa4"}\n{"step": 1}\n'
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        repair(path, 5)
        assert [record["step"] for record in records(path)] == list(range(content[:length].count(b"\n")))


def test_lines_that_are_no_records_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 0}\n\x00\x00\n[1]\n{"a": 1}\n{"step": 1}\n')
    assert repair(path, 9) == Repair(unreadable_lines=3)
    assert [record["step"] for record in records(path)] == [0, 1]


def test_a_file_with_nothing_to_take_out_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n')
    before = path.stat().st_ino
    assert not repair(path, 1)
    assert path.stat().st_ino == before
    assert not repair(tmp_path / "absent.jsonl", 0)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.seen.append("closed")


def test_several_trackers_see_the_same() -> None:
    first, second = Recorder(), Recorder()
    both = Trackers([first, second])
    both.log(3, {"a": 1})
    both.close()
    assert first.seen == second.seen == [(3, {"a": 1}), "closed"]


def test_the_progress_line_shows_what_was_measured() -> None:
    text = line(2, 40, {"reward/mean": 0.41234, "train/loss": math.nan, "weights/version": "0.3", "other": 1})
    assert text == "rollout  3/40  reward 0.4123  version 0.3"


def test_the_progress_line_says_what_failed() -> None:
    text = line(0, 1, {"reward/first_error": "RuntimeError: no verdict"})
    assert text == "rollout 1/1  reward failed: RuntimeError: no verdict"


def test_the_line_of_an_evaluation_says_which_version_it_measured_or_what_failed() -> None:
    out = io.StringIO()
    tracker = EvalTracker(Console(file=out, width=80))
    tracker.log(3, {"eval/reward/mean": 0.75, "eval/version": 3})
    tracker.log(4, {"eval/version": 4, "eval/error": "NoEngineServes: none"})
    assert out.getvalue().split("\n") == [
        "   eval  after 3 rollouts  reward 0.75  version 3",
        "   eval  after 4 rollouts  version 4  failed: NoEngineServes: none",
        "",
    ]


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    tracker = ProgressTracker(2, 0, Console(file=out, width=40))
    tracker.log(0, {"reward/mean": 0.25, "perf/step_s": 1.5})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    assert out.getvalue().split("\n") == ["rollout 1/2  reward 0.25  s 1.5", "rollout 2/2  reward 0.5", ""]
