"""What is submitted for a run: the same job each time, under a new number, and never twice at once."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.commands.submit import _checked
from orchestrator.jobs.submission import EarlierJob, Submission, command_line, exit_status, next_attempt
from orchestrator.options.load import load
from orchestrator.options.problems import ConfigError
from orchestrator.running.run_dir import config_hash
from tests.orchestrator.valid_config import write

FLAGS = ("--run.dir", "/shared/runs/test", "--train.lr", "1e-5")


@pytest.fixture
def asked(tmp_path: Path) -> Submission:
    return _checked(write(tmp_path), list(FLAGS), tmp_path)


def test_the_job_is_the_command_in_the_copy_of_the_working_directory(asked: Submission, tmp_path: Path) -> None:
    assert asked.entrypoint == "python -m orchestrator train valid.yaml --run.dir /shared/runs/test --train.lr 1e-5"
    assert asked.runtime_env["working_dir"] == str(tmp_path)
    assert {"/.git", "/.venv", "/runs"} <= set(asked.runtime_env["excludes"])


def test_it_says_which_run_and_which_configuration(asked: Submission, tmp_path: Path) -> None:
    hashed = config_hash(load(tmp_path / "valid.yaml", FLAGS))
    assert asked.metadata == {"run": "test", "run_dir": "/shared/runs/test", "config_hash": hashed}


def test_stopping_leaves_time_for_the_checkpoint(tmp_path: Path) -> None:
    asked = _checked(write(tmp_path), [*FLAGS, "--checkpoint.stop_deadline_s", "300"], tmp_path)
    assert asked.env_vars == {"RAY_JOB_STOP_WAIT_TIME_S": "360"}


def test_flags_with_spaces_and_quotes_arrive_as_they_were(tmp_path: Path) -> None:
    flags = [*FLAGS, "--rollout.stop", "it's", "a b", "--rollout.max_response_len", "8"]
    asked = _checked(write(tmp_path), flags, tmp_path)
    assert shlex.split(asked.entrypoint)[5:] == flags


def test_submissions_count_up_and_are_of_one_run_directory(asked: Submission, tmp_path: Path) -> None:
    other = _checked(write(tmp_path), ["--run.dir", "/shared/other"], tmp_path)
    assert next_attempt(asked, []) == 1
    ended = [EarlierJob(asked.submission_id(n), status, {}) for n, status in ((1, "FAILED"), (10, "STOPPED"))]
    running_elsewhere = EarlierJob(other.submission_id(40), "RUNNING", {})
    assert next_attempt(asked, [*ended, running_elsewhere]) == 11
    assert asked.submission_id(11).startswith("test-")


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_run_under_way_is_not_started_again(asked: Submission, status: str) -> None:
    with pytest.raises(ConfigError, match=f"is {status} on this run"):
        next_attempt(asked, [EarlierJob(asked.submission_id(3), status, {})])


def test_the_line_for_rays_own_command_says_the_same(asked: Submission) -> None:
    words = shlex.split(command_line(asked, "http://head:8265", 1))
    given = dict(zip(words[3::2], words[4::2], strict=False))
    assert words[:3] == ["ray", "job", "submit"]
    assert given["--address"] == "http://head:8265"
    assert given["--submission-id"] == asked.submission_id(1)
    assert json.loads(words[words.index("--runtime-env-json") + 1]) == asked.runtime_env
    assert json.loads(words[words.index("--metadata-json") + 1]) == asked.metadata
    assert shlex.join(words[words.index("--") + 1 :]) == asked.entrypoint


def test_printing_it_needs_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["submit", str(write(tmp_path)), "--print", "--address", "http://x:1", "--working-dir", str(tmp_path)]
    assert main([*command, *FLAGS]) == 0
    assert capsys.readouterr().out.startswith("ray job submit --address http://x:1 --submission-id test-")


def test_credentials_of_who_submits_stay_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-key")
    asked = _checked(write(tmp_path), list(FLAGS), tmp_path)
    assert "canary-key" not in f"{asked} {command_line(asked, 'http://x:1', 1)}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "run.dir: defaults to runs/test, which is relative"),
        (("--run.dir", "/r", "--checkpoint.load", "old"), "checkpoint.load (--checkpoint.load): old is relative"),
        (("--run.dir", "/r", "--train.lrr", "1"), "did you mean train.lr?"),
        (("--run.dir", "/r", "--rollout.temperature", "0"), "above 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    command = ["submit", str(write(tmp_path)), "--address", "http://127.0.0.1:1", "--working-dir", str(tmp_path)]
    assert main([*command, *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_configuration_that_is_not_uploaded_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work" / "tests").mkdir(parents=True)
    outside = write(tmp_path)
    excluded = tmp_path / "work" / "tests" / "valid.yaml"
    excluded.write_text(outside.read_text())
    for path, said in ((outside, "is not in"), (excluded, "nothing in tests/ is")):
        command = ["submit", str(path), "--address", "http://x:1", "--working-dir", str(tmp_path / "work")]
        assert main([*command, *FLAGS]) == 2
        assert said in capsys.readouterr().err


def test_no_cluster_there_is_a_plain_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["submit", str(write(tmp_path)), "--address", "http://127.0.0.1:1", "--working-dir", str(tmp_path)]
    assert main([*command, *FLAGS]) == 2
    shown = capsys.readouterr().err
    assert "--address: no Ray dashboard answers at http://127.0.0.1:1" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 4, 4),
        ("FAILED", 5, 5),
        ("FAILED", 130, 130),
        ("FAILED", 1, 5),
        ("FAILED", -9, 5),
        ("FAILED", None, 5),
        ("FAILED", 0, 5),
        ("STOPPED", None, 130),
        ("STOPPED", 130, 130),
    ],
)
def test_the_exit_status_is_the_drivers(status: str, driver: int | None, code: int) -> None:
    assert exit_status(status, driver) == code
