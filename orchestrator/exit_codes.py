"""How a command ends, for scripts and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from orchestrator.options.problems import ConfigError
from orchestrator.running.interrupts import Terminated
from state.errors import InvariantViolation, ResumeError


class ExitCode(IntEnum):
    DONE = 0
    CONFIG = 2
    """The configuration or the command line is wrong; nothing was started."""
    RESUME = 3
    """What to continue from is missing, damaged, or of another model or data, and nothing was started; or what was
    loaded is not what was saved, and nothing was trained."""
    INVARIANT = 4
    """Weights were not what they had to be; the run ended before they could do harm."""
    FAILED = 5
    """A worker, an engine or the driver failed."""
    INTERRUPTED = 130
    """SIGINT or SIGTERM."""


_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
    (Terminated, ExitCode.INTERRUPTED),
    (ConfigError, ExitCode.CONFIG),
    (ResumeError, ExitCode.RESUME),
    (InvariantViolation, ExitCode.INVARIANT),
)


def exit_code(error: BaseException) -> ExitCode:
    """The code for an error: of the first in its chain (causes, contexts, groups) that has one, else `FAILED`.

    An error of a Ray task is an instance of its cause's class too, so it is found as that.
    """
    for link in _chain(error, set()):
        for kind, code in _CODES:
            if isinstance(link, kind):
                return code
    return ExitCode.FAILED


def _chain(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _chain(member, seen)
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if following is not None:
        yield from _chain(following, seen)
