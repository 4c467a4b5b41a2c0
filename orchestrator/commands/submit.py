"""`slotwise submit`: the run as a job of a Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.checks import configuration, surroundings
from orchestrator.commands.command_line import parser
from orchestrator.exit_codes import ExitCode
from orchestrator.jobs import submission
from orchestrator.options.load import resolve
from orchestrator.options.problems import ConfigError, Problem

_ABOUT = """Run CONFIG.yaml as a job of a Ray cluster. The working directory is uploaded; the job runs `slotwise train`
in the copy. Submitting the same run again continues it. Options of `slotwise train` may follow."""


def main(arguments: list[str]) -> int:
    command_line = parser("submit", _ABOUT)
    command_line.add_argument("config", type=Path, metavar="CONFIG.yaml")
    command_line.add_argument(
        "--address",
        default=os.environ.get("RAY_API_SERVER_ADDRESS"),
        help="of the cluster's dashboard, such as http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)",
    )
    command_line.add_argument(
        "--working-dir", type=Path, default=Path(), help="what is uploaded (default: this folder)"
    )
    command_line.add_argument(
        "--follow", action="store_true", help="show the job's output; exit as its driver did. Ctrl-C leaves it running"
    )
    command_line.add_argument(
        "--print", action="store_true", help="print the `ray job submit` line, and submit nothing"
    )
    options, flags = command_line.parse_known_args(arguments)
    if options.address is None:
        raise ConfigError([Problem("--address", "of the cluster's dashboard is needed, such as http://HEAD:8265")])
    asked = _checked(options.config, flags, options.working_dir)
    if options.print:
        print(submission.command_line(asked, options.address, attempt=1))
        return ExitCode.DONE
    from orchestrator.jobs import job_client

    client = job_client.connect(options.address)
    submission_id = job_client.submit(client, asked)
    print(f"submitted {submission_id}: {asked.entrypoint}", flush=True)
    if not options.follow:
        where = f"--address {options.address} {submission_id}"
        print(f"  watch it: ray job logs --follow {where}\n  end it, with a checkpoint: ray job stop {where}")
        return ExitCode.DONE
    try:
        return job_client.follow(client, submission_id, _show)
    except KeyboardInterrupt:
        print(f"\nno longer following; job {submission_id} goes on", file=sys.stderr)
        raise


def _checked(path: Path, flags: list[str], working_dir: Path) -> submission.Submission:
    """What can be known to be wrong before anything is submitted is said now."""
    resolved = resolve(path, flags)
    found = (*configuration.problems(resolved.config), *surroundings.thrown_away(resolved.config))
    if found:
        raise ConfigError([resolved.located(problem) for problem in found])
    return submission.submission(resolved.config, path, flags, working_dir)


def _show(text: str) -> None:
    print(text, end="", flush=True)
