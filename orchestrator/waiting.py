"""Waiting for actors: with a limit, and with the first failure surfacing at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from state.errors import InvariantViolation, SlotwiseError


class WorkerFailed(SlotwiseError):
    """A training worker, an engine or the rollout manager died or raised (exit 5)."""


def gather(calls: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """Results of one call to several actors, by name.

    The first failure is raised as soon as it is there, whatever the others do: an `InvariantViolation` as itself, any
    other as `WorkerFailed` with the actor's name and traceback. `TimeoutError` names those that have not answered.
    """
    deadline = time.monotonic() + timeout_s
    names = {ref: name for name, ref in calls.items()}
    pending = list(calls.values())
    results: dict[str, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(names[ref] for ref in pending)
            raise WorkerFailed(f"{what}: no answer within {timeout_s:g} s from {late}")
        for ref in done:
            results[names[ref]] = _result(ref, names[ref], what)
    return {name: results[name] for name in calls}


def wait_for(call: Any, name: str, what: str, timeout_s: float) -> Any:
    """The result of one call, as `gather`."""
    return gather({name: call}, what, timeout_s)[name]


def _result(ref: Any, name: str, what: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InvariantViolation):
            raise cause from error
        raise WorkerFailed(f"{name} failed to {what}:\n{error}") from error
    except (RayActorError, GetTimeoutError) as error:
        raise WorkerFailed(f"{name} died while it was to {what}: {error}") from error
