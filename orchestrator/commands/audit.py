"""`slotwise audit`: whether a run kept its promises, from its journals."""

from __future__ import annotations

from pathlib import Path

from orchestrator.commands.command_line import parser, print_json, reader_may_leave
from orchestrator.exit_codes import ExitCode
from orchestrator.options.problems import ConfigError, Problem


def main(arguments: list[str]) -> int:
    command_line = parser("audit", "Replay a run's journals and check the invariants.")
    command_line.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command_line.add_argument(
        "--timeline", action="store_true", help="also print everything that the driver did, and who held what when"
    )
    command_line.add_argument("--json", action="store_true", help="all of it for programs")
    options = command_line.parse_args(arguments)
    from state.audit import audit, journals

    try:
        if not journals(options.run_dir):
            what = "holds no journals (journal/*.jsonl): it is not the directory of a run"
            raise ConfigError([Problem("RUN_DIR", f"{options.run_dir} {what}")])
        report = audit(options.run_dir)
    except OSError as error:
        raise ConfigError([Problem("RUN_DIR", f"{error.filename} cannot be read: {error.strerror}")]) from error
    with reader_may_leave():
        if options.json:
            print_json(report.to_json())
        else:
            print(report.summary())
            print(f"\n{report.timeline()}" if options.timeline else "who held what when: --timeline")
    return ExitCode.DONE if report.ok else ExitCode.INVARIANT
