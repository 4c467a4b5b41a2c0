"""Ends every job of the cluster that this pod heads, and waits until they have ended: for a preStop hook.

python -m orchestrator.commands.end_jobs --wait-s 195
"""

from __future__ import annotations

import argparse
import time

from ray.job_submission import JobSubmissionClient

from orchestrator.jobs.submission import FINAL


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when all have ended in time."""
    parser = argparse.ArgumentParser(prog="end_jobs", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--address", default="http://127.0.0.1:8265", help="of the dashboard")
    parser.add_argument("--wait-s", type=float, required=True)
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.wait_s
    client = JobSubmissionClient(options.address)
    asked: set[str] = set()
    while running := _running(client):
        for job in running - asked:
            client.stop_job(job)
        asked |= running
        if time.monotonic() > deadline:
            print(f"still running after {options.wait_s:g} s: {', '.join(sorted(running))}")
            return 1
        time.sleep(0.5)
    return 0


def _running(client: JobSubmissionClient) -> set[str]:
    return {str(job.submission_id) for job in client.list_jobs() if job.submission_id and str(job.status) not in FINAL}


if __name__ == "__main__":
    raise SystemExit(main())
