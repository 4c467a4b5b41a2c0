"""What is submitted to a Ray cluster for a run, as values. `job_client.py` carries it out.

One run may be submitted again and again: each submission continues where the checkpoints say. Their ids count up, and
a run that is under way is never started a second time.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode
from orchestrator.options.problems import ConfigError, Problem
from orchestrator.resume import resuming
from orchestrator.running.run_dir import config_hash

EXCLUDES = ("/.git", "/.venv", "/.venv-*", "/runs", "/build", "/tests", "/benchmarks", "__pycache__", "*.egg-info")
"""Not uploaded, beside what .gitignore and .rayignore name. Patterns as in .gitignore."""
TEARDOWN_S = 60
"""What a driver may take to end its actors, beside the checkpoint that it saves first."""
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, apart from which attempt it is."""

    run: str
    entrypoint: str
    working_dir: str
    env_vars: dict[str, str]
    metadata: dict[str, str]

    @property
    def runtime_env(self) -> dict[str, Any]:
        return {"working_dir": self.working_dir, "excludes": list(EXCLUDES), "env_vars": self.env_vars}

    def submission_id(self, attempt: int) -> str:
        """`NAME-HASH-ATTEMPT`; the hash is of the run directory, so that runs of one name are told apart."""
        return f"{_prefix(self.run, self.metadata['run_dir'])}{attempt}"


@dataclass(frozen=True, slots=True)
class EarlierJob:
    """A submission that the cluster knows."""

    submission_id: str
    status: str
    metadata: dict[str, str]


def submission(config: Config, config_path: Path, flags: Sequence[str], working_dir: Path) -> Submission:
    """The job of a run whose configuration lies in `working_dir`. Raises `ConfigError`."""
    path, root = config_path.resolve(), working_dir.resolve()
    if not path.is_relative_to(root):
        why = f"{config_path} is not in {root}, which is what the job gets to see; submit from a folder above it"
        raise ConfigError([Problem("CONFIG.yaml", why)])
    relative = path.relative_to(root)
    top = relative.parts[0]
    if f"/{top}" in EXCLUDES:
        raise ConfigError([Problem("CONFIG.yaml", f"{relative} is not uploaded, as nothing in {top}/ is; move it")])
    return Submission(
        run=config.run.name,
        entrypoint=shlex.join(["python", "-m", "orchestrator", "train", str(relative), *flags]),
        working_dir=str(root),
        env_vars={"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s(config))},
        metadata={
            "run": config.run.name,
            "run_dir": str(resuming.run_dir(config)),
            "config_hash": config_hash(config),
        },
    )


def stop_wait_s(config: Config) -> int:
    """Seconds from the request to end until the driver may be killed: a checkpoint and the end of all actors."""
    return round(config.checkpoint.stop_deadline_s) + TEARDOWN_S


def next_attempt(asked: Submission, jobs: Iterable[EarlierJob]) -> int:
    """The number of this submission of the run. Raises `ConfigError` while an earlier one is under way."""
    prefix = _prefix(asked.run, asked.metadata["run_dir"])
    earlier = [job for job in jobs if re.fullmatch(re.escape(prefix) + "[0-9]+", job.submission_id)]
    running = [job for job in earlier if job.status not in FINAL]
    if running:
        job = running[0]
        how = "follow it with `ray job logs --follow`, or end it with `ray job stop` and submit again"
        raise ConfigError([Problem("run.dir", f"job {job.submission_id} is {job.status} on this run; {how}")])
    return 1 + max((int(job.submission_id.removeprefix(prefix)) for job in earlier), default=0)


def command_line(asked: Submission, address: str, attempt: int) -> str:
    """The same with Ray's own command."""
    words = ["ray", "job", "submit", "--address", address, "--submission-id", asked.submission_id(attempt), "--no-wait"]
    words += ["--runtime-env-json", json.dumps(asked.runtime_env), "--metadata-json", json.dumps(asked.metadata)]
    return f"{shlex.join(words)} -- {asked.entrypoint}"


def exit_status(status: str, driver_exit_code: int | None) -> int:
    """The exit code of a job that ended: its driver's, where it had one."""
    if status == "SUCCEEDED":
        return ExitCode.DONE
    if status == "STOPPED":
        return ExitCode.INTERRUPTED
    known = driver_exit_code is not None and driver_exit_code in tuple(ExitCode) and driver_exit_code != 0
    return driver_exit_code if known and driver_exit_code is not None else ExitCode.FAILED


def _prefix(run: str, run_dir: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", run).strip("-") or "run"
    return f"{readable}-{hashlib.sha256(run_dir.encode()).hexdigest()[:6]}-"
