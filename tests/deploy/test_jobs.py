"""Runs as jobs of a real cluster: how they end is told truly, and what was submitted again continues."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient

from orchestrator.commands import end_jobs
from tests.deploy.conftest import Jobs
from tests.e2e.runs import REPO, journal, lines, until

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]  # real jobs, of two runs each
SAVED: dict[str, Any] = {"loop": {"num_rollout": 1}, "checkpoint": {"save_interval": 1}}
HOOKS = """
from state.errors import InvariantViolation

def violates(worker):
    def init(*_):
        raise InvariantViolation("on purpose")
    worker.init = init

def fails(worker):
    raise RuntimeError("on purpose")
"""


def test_the_same_submission_again_continues_the_run(dashboard: str, jobs: Jobs) -> None:
    config = jobs.config("again", SAVED)
    first = jobs.submit(dashboard, config, "--follow")
    assert first.code == 0, first.output
    assert "done. Which weights were where" in first.output
    second = jobs.submit(dashboard, config, "--follow", "--loop.num_rollout", "2")
    assert second.code == 0, second.output

    run_dir = jobs.path / "again"
    started = journal(run_dir, "driver", "gang_started")
    assert [entry["resume"]["source"] for entry in started] == ["fresh", "native"]
    assert [entry["step"] for entry in lines(run_dir / "metrics.jsonl")] == [0, 1]
    details = {job.submission_id: job for job in JobSubmissionClient(dashboard).list_jobs() if job.metadata}
    ours = [job for job in details.values() if job.metadata["run_dir"] == str(run_dir)]
    assert sorted(job.submission_id.rpartition("-")[2] for job in ours) == ["1", "2"]
    by_attempt = sorted(ours, key=lambda job: job.submission_id)
    assert [job.metadata["config_hash"] for job in by_attempt] == [entry["config_hash"] for entry in started]


def test_what_is_found_wrong_in_the_job_is_its_exit_status(dashboard: str, jobs: Jobs) -> None:
    """Exit code 3 from the driver, through the cluster, to whoever follows the job; Ray's own status is FAILED."""
    config = jobs.config("nothing", SAVED | {"checkpoint": {"load": str(jobs.path / "absent"), "resume": "must"}})
    ended = jobs.submit(dashboard, config, "--follow")
    assert ended.code == 3, ended.output
    assert str(jobs.path / "absent") in ended.output


@pytest.mark.parametrize(("hook", "code"), [("violates", 4), ("fails", 5)])
def test_how_a_worker_ends_is_the_exit_status(dashboard: str, jobs: Jobs, hook: str, code: int) -> None:
    (jobs.path / "hooks.py").write_text(HOOKS)
    config = jobs.config(hook, SAVED | {"train": {"setup_hook": f"hooks:{hook}"}})
    ended = jobs.submit(dashboard, config, "--follow")
    assert ended.code == code, ended.output
    assert "on purpose" in ended.output


def test_the_plain_line_does_the_same_and_tells_a_wrong_option(dashboard: str, jobs: Jobs) -> None:
    line = jobs.submit(dashboard, jobs.config("plain", SAVED), "--print").output.strip()
    subprocess.run(
        [Path(sys.executable).with_name("ray"), *shlex.split(line)[1:], "--no.such", "1"],
        check=True,
        cwd=REPO,
        capture_output=True,
        timeout=60,
    )
    client = JobSubmissionClient(dashboard)
    (job,) = [job for job in client.list_jobs() if (job.metadata or {}).get("run") == "plain"]
    assert job.submission_id is not None
    info = until(lambda: _ended(client, str(job.submission_id)), "the job has ended")
    assert (str(info.status), info.driver_exit_code) == ("FAILED", 2)


def test_stopping_a_job_saves_and_ends_it_whole_and_submitting_it_again_continues(dashboard: str, jobs: Jobs) -> None:
    config = jobs.config("stopped", {"loop": {"num_rollout": 1000}, "checkpoint": {"save_interval": 1000}})
    run_dir = jobs.path / "stopped"
    submitted = jobs.submit(dashboard, config, "--tracking.wandb.mode", "offline")
    assert submitted.code == 0, submitted.output
    client = JobSubmissionClient(dashboard)
    (job,) = [job for job in client.list_jobs() if (job.metadata or {}).get("run") == "stopped"]
    until(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir / "metrics.jsonl"), "a first rollout")
    refused = jobs.submit(dashboard, config)
    assert (refused.code, "is RUNNING on this run" in refused.output) == (2, True), refused.output

    assert end_jobs.main(["--address", dashboard, "--wait-s", "120"]) == 0  # what the head's preStop does
    info = until(lambda: _ended(client, str(job.submission_id)), "the job has ended")

    assert str(info.status) == "STOPPED"
    trained = [entry["step"] for entry in lines(run_dir / "metrics.jsonl")]
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == trained[-1]
    assert "failed" in json.dumps(journal(run_dir, "driver", "run_ended")[-1])
    written = b"".join(path.read_bytes() for path in (run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert written.count(b"weights/version") >= len(trained), "W&B has the last step too"
    again = jobs.submit(dashboard, config, "--follow", "--loop.num_rollout", str(trained[-1] + 2))
    assert again.code == 0, again.output
    assert journal(run_dir, "driver", "gang_started")[-1]["resume"]["iteration"] == trained[-1]


def _ended(client: JobSubmissionClient, submission_id: str) -> Any:
    info = client.get_job_info(submission_id)
    return info if info.status.is_terminal() else None
