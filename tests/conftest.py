"""Of every test."""

import signal

import pytest
from hypothesis import settings

# What is asserted is behaviour: how long an example takes depends on who else uses the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A suite that a shell started in the background would ignore interrupts, and so would every program that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what tests have counted (`record_property("counted", ...)`), on whichever core they ran."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == "counted":
                    terminalreporter.write_line(str(value))
