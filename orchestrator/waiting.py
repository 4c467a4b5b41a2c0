"""Waiting for actors: with a limit, and with the first failure surfacing at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from state.errors import InvariantViolation, SlotwiseError


class WorkerFailed(SlotwiseError):
    """A training worker, an engine or the rollout manager died or raised (exit 5).

    `workers` are the names of those that failed. Failures of the same `kind` may have one cause: it says what they were
    to do and how it failed, and neither who nor when. `raised` is their own error, None where they died or were silent.
    """

    def __init__(
        self, message: str, workers: tuple[str, ...] = (), kind: str = "", raised: Exception | None = None
    ) -> None:
        super().__init__(message)
        self.workers, self.kind, self.raised = workers, kind, raised


def gather(
    calls: Mapping[str, Any], what: str, timeout_s: float, lifelines: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Results of one call to several actors, by name.

    The first failure is raised as soon as it is there, whatever the others do: an `InvariantViolation` as itself, any
    other as `WorkerFailed` with the actor's name and traceback. So is the death of an actor that nothing is asked of:
    `lifelines` are calls that end only with theirs. A limit that is exceeded names those that have not answered.
    """
    deadline = time.monotonic() + timeout_s
    lines = {ref: name for name, ref in (lifelines or {}).items()}
    names = lines | {ref: name for name, ref in calls.items()}
    pending = list(calls.values())
    results: dict[str, Any] = {}
    while pending:
        left = max(0.0, deadline - time.monotonic())
        # What is first in the list is taken first: an answer that is there counts, whoever died meanwhile.
        done, _ = ray.wait([*pending, *lines], num_returns=1, timeout=left)
        if not done:
            late = tuple(names[ref] for ref in pending)
            raise WorkerFailed(f"{what}: no answer within {timeout_s:g} s from {', '.join(late)}", late, what)
        (ref,) = done
        if ref in lines:
            _result(ref, names[ref], f"wait while others were to {what}")
            raise WorkerFailed(f"{names[ref]} ended while others were to {what}", (names[ref],), "die")
        results[names[ref]] = _result(ref, names[ref], what)
        pending.remove(ref)
    return {name: results[name] for name in calls}


def wait_for(call: Any, name: str, what: str, timeout_s: float, lifelines: Mapping[str, Any] | None = None) -> Any:
    """The result of one call, as `gather`."""
    return gather({name: call}, what, timeout_s, lifelines)[name]


def _result(ref: Any, name: str, what: str) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InvariantViolation):
            raise cause from error
        kind = f"{type(cause).__name__} when it was to {what}"
        raised = cause if isinstance(cause, Exception) else None
        raise WorkerFailed(f"{name} failed to {what}:\n{error}", (name,), kind, raised) from error
    except (RayActorError, GetTimeoutError) as error:
        kind = f"death when it was to {what}"
        raise WorkerFailed(f"{name} died while it was to {what}: {error}", (name,), kind) from error
