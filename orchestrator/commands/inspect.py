"""`slotwise inspect`: the page of a run, from its journals."""

from __future__ import annotations

from pathlib import Path

from orchestrator.commands.command_line import parser, port
from orchestrator.exit_codes import ExitCode
from orchestrator.inspector.viewer import view


def main(arguments: list[str]) -> int:
    command_line = parser(
        "inspect", "A page of who held which weights when: from a run's journals, also while it runs."
    )
    command_line.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command_line.add_argument("--port", type=port, default=0, help="port to listen on (default: a free one)")
    command_line.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    options = command_line.parse_args(arguments)
    view(options.run_dir, options.host, options.port, lambda address: print(f"open {address}", flush=True))
    return ExitCode.DONE
