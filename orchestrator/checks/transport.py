"""Whether weights can travel from trainers to engines as configured."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config import Config
from orchestrator.options.problems import Problem

KEY = "weights.directory"


def directory(config: Config) -> Iterator[Problem]:
    """Files need a place that everyone calls by the same name."""
    given, transport = config.weights.directory, config.weights.transport
    if transport != "disk":
        if given is not None:
            yield Problem(KEY, f"is set, but weights.transport is {transport}; set that to disk, or leave this out")
    elif given is None:
        yield Problem(KEY, "needed by weights.transport disk: a directory that trainers and engines share")
    elif not given.startswith("/"):
        yield Problem(KEY, f"{given!r} is relative, and trainers and engines run in other places; give the whole path")
