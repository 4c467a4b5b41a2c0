"""`slotwise doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

from pathlib import Path

from orchestrator import doctor
from orchestrator.commands.command_line import parser, print_json
from orchestrator.exit_codes import ExitCode

_MARKS = {"ok": "ok", "note": "--", "missing": "MISSING"}


def main(arguments: list[str]) -> int:
    options = parser(
        "doctor", "What this machine can run, and what is missing. Exits 0 when it can run the quickstart."
    )
    options.add_argument("--json", action="store_true")
    as_json = options.parse_args(arguments).json
    facts = doctor.look(Path.cwd())
    checks = doctor.examine(facts)
    ok = doctor.can_run(checks)
    if as_json:
        print_json(doctor.to_json(facts, checks))
    else:
        for check in checks:
            remedy = f" ({check.remedy})" if check.remedy else ""
            print(f"{_MARKS[check.level]:8}{check.name}: {check.found}{remedy}")
        print("This machine can run the quickstart." if ok else "This machine cannot run the quickstart yet.")
    return ExitCode.DONE if ok else ExitCode.FAILED
