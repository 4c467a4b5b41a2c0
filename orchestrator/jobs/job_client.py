"""Submits, finds and follows jobs through the dashboard of a Ray cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ray.job_submission import JobSubmissionClient

from orchestrator.jobs.submission import FINAL, EarlierJob, Submission, exit_status, next_attempt
from orchestrator.options.problems import ConfigError, Problem

POLL_S = 0.5


def connect(address: str) -> JobSubmissionClient:
    """A client of the dashboard at `address`. Raises `ConfigError` when nothing answers there."""
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([Problem("--address", f"no Ray dashboard answers at {address}: {error}")]) from error


def submit(client: JobSubmissionClient, asked: Submission, agent_timeout_s: float = 60.0) -> str:
    """Start it; returns the id. Raises `ConfigError` when the run is under way already.

    A dashboard answers some seconds before its node takes jobs; that is waited for.
    """
    jobs = [
        EarlierJob(job.submission_id, str(job.status), job.metadata or {})
        for job in client.list_jobs()
        if job.submission_id is not None
    ]
    submission_id = asked.submission_id(next_attempt(asked, jobs))
    deadline = time.monotonic() + agent_timeout_s
    while True:
        try:
            client.submit_job(
                entrypoint=asked.entrypoint,
                runtime_env=dict(asked.runtime_env),
                metadata=asked.metadata,
                submission_id=submission_id,
            )
            return submission_id
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            if time.monotonic() > deadline:
                why = f"the cluster took no job for {agent_timeout_s:g} s, though its dashboard answers: {error}"
                raise ConfigError([Problem("--address", why)]) from error
        time.sleep(POLL_S)


def follow(client: JobSubmissionClient, submission_id: str, show: Callable[[str], None]) -> int:
    """Pass on the job's output until it has ended; returns the exit code of its driver."""
    output = _Output(show)
    while True:
        try:
            asyncio.run(_receive(client, submission_id, output))
        except (OSError, RuntimeError) as error:
            show(f"\n(no connection to the job, trying again: {error})\n")
        job = client.get_job_info(submission_id)
        if str(job.status) in FINAL:
            show(f"job {submission_id} {job.status}: {job.message}\n")
            return exit_status(str(job.status), job.driver_exit_code)
        time.sleep(POLL_S)


class _Output:
    """What a job prints, which the cluster sends from its start at every connection; shows each character once."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._shown = self._received = 0

    def begin(self) -> None:
        self._received = 0

    def receive(self, text: str) -> None:
        new = text[max(0, self._shown - self._received) :]
        self._received += len(text)
        if new:
            self._show(new)
            self._shown = self._received


async def _receive(client: JobSubmissionClient, submission_id: str, output: _Output) -> None:
    output.begin()
    async for text in client.tail_job_logs(submission_id):
        output.receive(text)
