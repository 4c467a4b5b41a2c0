"""`slotwise slots`: which weights are live on every rank and engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live

from orchestrator import slots_view
from orchestrator.commands.command_line import parser, print_json
from orchestrator.exit_codes import ExitCode

WATCH_EVERY_S = 1.0


def main(arguments: list[str]) -> int:
    command_line = parser("slots", "Which weights are live on every rank and engine.")
    command_line.add_argument(
        "--run",
        help="run directory, or a name under runs/ (default: the newest there); with --address, the name of a run",
    )
    command_line.add_argument(
        "--address", help="Ray cluster that the run goes on in (HOST:PORT, ray://HOST:PORT or auto), asked through Ray"
    )
    command_line.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    command_line.add_argument("--json", action="store_true")
    options = command_line.parse_args(arguments)
    with _asking(options.address, options.run) as ask:
        if options.watch:
            _watch(ask, options.json)
        elif options.json:
            print_json(ask())
        else:
            console = Console()
            with console.capture() as drawn:  # rich itself would end the process when nobody reads on
                console.print(slots_view.render(ask(), time.time()))
            print(drawn.get(), end="")
    return ExitCode.DONE


def _watch(ask: Callable[[], Mapping[str, Any]], as_json: bool) -> None:
    views = slots_view.watch(ask, WATCH_EVERY_S)
    if as_json:
        for view in views:
            print_json(view)
    with Live(auto_refresh=False, screen=True) as live:
        for view in views:
            live.update(slots_view.render(view, time.time()), refresh=True)


@contextmanager
def _asking(address: str | None, run: str | None) -> Iterator[Callable[[], Mapping[str, Any]]]:
    if address is None:
        yield partial(slots_view.read, slots_view.find_run(run))
        return
    from orchestrator import remote_slots  # Ray loads for a second; a run on this machine is asked without it

    with remote_slots.asking(address, run) as ask:
        yield ask
