"""Submits, finds and follows jobs through the dashboard of a Ray cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ray.job_submission import JobSubmissionClient

from orchestrator.options import ConfigError, Problem
from orchestrator.submission import FINAL, EarlierJob, Submission, exit_status, next_attempt

POLL_S = 0.5


def connect(address: str) -> JobSubmissionClient:
    """A client of the dashboard at `address`. Raises `ConfigError` when nothing answers there."""
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([Problem("--address", f"no Ray dashboard answers at {address}: {error}")]) from error


def submit(client: JobSubmissionClient, asked: Submission) -> str:
    """Start it; returns the id. Raises `ConfigError` when the run is under way already."""
    jobs = [
        EarlierJob(job.submission_id, str(job.status), job.metadata or {})
        for job in client.list_jobs()
        if job.submission_id is not None
    ]
    return str(
        client.submit_job(
            entrypoint=asked.entrypoint,
            runtime_env=asked.runtime_env,
            metadata=asked.metadata,
            submission_id=asked.submission_id(next_attempt(asked, jobs)),
        )
    )


def follow(client: JobSubmissionClient, submission_id: str, show: Callable[[str], None]) -> int:
    """Pass on the job's output until it has ended; returns the exit code of its driver."""
    shown = 0
    while True:
        try:
            shown = asyncio.run(_show_from(client, submission_id, shown, show))
        except (OSError, RuntimeError) as error:
            show(f"\n(no connection to the job, trying again: {error})\n")
        job = client.get_job_info(submission_id)
        if str(job.status) in FINAL:
            show(f"job {submission_id} {job.status}: {job.message}\n")
            return exit_status(str(job.status), job.driver_exit_code)
        time.sleep(POLL_S)


async def _show_from(client: JobSubmissionClient, submission_id: str, shown: int, show: Callable[[str], None]) -> int:
    """The output from its character `shown` on, for as long as the cluster sends it; returns how far that was."""
    position = 0
    async for text in client.tail_job_logs(submission_id):
        new = text[max(0, shown - position) :]
        position += len(text)
        if new:
            show(new)
            shown = position
    return shown
