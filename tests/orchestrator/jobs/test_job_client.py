"""What is asked of a cluster for a run, and what comes of its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.commands import end_jobs
from orchestrator.commands.submit import _checked
from orchestrator.jobs import job_client
from orchestrator.jobs.submission import Submission
from orchestrator.options.problems import ConfigError
from tests.orchestrator.valid_config import write

NOT_YET = RuntimeError("Request failed with status code 500: No available agent to submit job")


class Cluster:
    """A client of a cluster that does what it is told to do."""

    def __init__(self, answers: list[Any] | None = None, jobs: list[Any] | None = None) -> None:
        self.answers, self.jobs = answers or [None], jobs or []
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []

    def list_jobs(self) -> list[Any]:
        return self.jobs

    def submit_job(self, **job: Any) -> None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        self.submitted.append(job)

    def stop_job(self, submission_id: str) -> None:
        self.stopped.append(submission_id)
        (job,) = [job for job in self.jobs if job.submission_id == submission_id]
        job.status = "STOPPED"


def job(submission_id: str | None, status: str) -> Any:
    return SimpleNamespace(submission_id=submission_id, status=status, metadata=None)


@pytest.fixture
def asked(tmp_path: Path) -> Submission:
    return _checked(write(tmp_path), ["--run.dir", "/shared/runs/test"], tmp_path)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_client, "POLL_S", 0.0)


def test_a_cluster_that_is_coming_up_is_waited_for(asked: Submission) -> None:
    cluster = Cluster([NOT_YET, NOT_YET, None])
    submission_id = job_client.submit(cluster, asked)  # type: ignore[arg-type]
    assert [each["submission_id"] for each in cluster.submitted] == [submission_id] == [asked.submission_id(1)]


def test_but_not_for_ever(asked: Submission) -> None:
    with pytest.raises(ConfigError, match="took no job for 0 s"):
        job_client.submit(Cluster([NOT_YET]), asked, agent_timeout_s=0.0)  # type: ignore[arg-type]


def test_another_answer_is_not_waited_for(asked: Submission) -> None:
    with pytest.raises(RuntimeError, match="already exists"):
        job_client.submit(Cluster([RuntimeError("Job already exists")]), asked)  # type: ignore[arg-type]


def test_a_run_under_way_is_not_submitted(asked: Submission) -> None:
    cluster = Cluster(jobs=[job(asked.submission_id(1), "RUNNING"), job(None, "RUNNING")])
    with pytest.raises(ConfigError, match="is RUNNING on this run"):
        job_client.submit(cluster, asked)  # type: ignore[arg-type]
    assert cluster.submitted == []


def test_output_is_shown_once_however_often_the_connection_is_lost() -> None:
    class Followed:
        """Sends the output from its start at each connection, as Ray does."""

        def __init__(self) -> None:
            self.sent = [["one\n", "tw"], ["one\ntwo\n"], ["one\n", "two\n", "three\n"]]
            self.states = ["RUNNING", "RUNNING", "FAILED"]

        async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
            for text in self.sent.pop(0):
                yield text
            if self.sent:
                raise RuntimeError("closed unexpectedly")

        def get_job_info(self, submission_id: str) -> Any:
            return SimpleNamespace(status=self.states.pop(0), driver_exit_code=3, message="exit code 3")

    shown: list[str] = []
    assert job_client.follow(Followed(), "test-1", shown.append) == 3  # type: ignore[arg-type]
    output = "".join(text for text in shown if "connection" not in text)
    assert output == "one\ntwo\nthree\njob test-1 FAILED: exit code 3\n"


def test_every_job_is_ended_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(jobs=[job("a", "RUNNING"), job("b", "SUCCEEDED"), job("c", "PENDING"), job(None, "RUNNING")])
    monkeypatch.setattr(end_jobs, "JobSubmissionClient", lambda address: cluster)
    assert end_jobs.main(["--wait-s", "10"]) == 0
    assert sorted(cluster.stopped) == ["a", "c"]


def test_a_job_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(jobs=[job("a", "RUNNING")])
    monkeypatch.setattr(cluster, "stop_job", lambda submission_id: None)
    monkeypatch.setattr(end_jobs, "JobSubmissionClient", lambda address: cluster)
    assert end_jobs.main(["--wait-s", "0"]) == 1
    assert "still running after 0 s: a" in capsys.readouterr().out
