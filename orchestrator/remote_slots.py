"""The slots of a run that goes on elsewhere in a Ray cluster: asked of its inspector, which Ray knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from orchestrator.inspector.actor import NAME
from orchestrator.joining import require_cluster
from orchestrator.options.problems import ConfigError, Problem

ANSWER_WITHIN_S = 10.0
OWN_NAMESPACE = "slotwise-slots"


@contextmanager
def asking(address: str, run: str | None) -> Iterator[Callable[[], Mapping[str, Any]]]:
    """Join the cluster as one who only looks; yields what asks the run. `ConfigError` says what is there instead."""
    require_cluster(address, "--address", "it is where the head of a Ray cluster listens, HOST:6379 unless told else")
    try:
        ray.init(address=address, namespace=OWN_NAMESPACE, configure_logging=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([Problem("--address", f"no Ray cluster answers at {address}: {error}")]) from error
    try:
        there = ray.util.list_named_actors(all_namespaces=True)
        chosen = choose([actor["namespace"] for actor in there if actor["name"] == f"{actor['namespace']}/{NAME}"], run)
        inspector = ray.get_actor(f"{chosen}/{NAME}", namespace=chosen)

        def ask() -> Mapping[str, Any]:
            try:
                view: Mapping[str, Any] = ray.get(inspector.view.remote(), timeout=ANSWER_WITHIN_S)
            except (GetTimeoutError, RayError) as error:
                gone = f"the inspector of {chosen} does not answer ({type(error).__name__}): the run may have ended"
                raise ConfigError([Problem("--run", gone)]) from error
            return view

        yield ask
    finally:
        ray.shutdown()


def choose(runs: Sequence[str], named: str | None) -> str:
    """The run that was named, or the only one there."""
    there = ", ".join(sorted(runs)) or "none"
    if named is None and len(runs) == 1:
        return runs[0]
    if named is None:
        raise ConfigError([Problem("--run", f"name one of the runs that are going on in this cluster: {there}")])
    if named not in runs:
        hint = "a run that has ended is shown from its directory, without --address"
        raise ConfigError([Problem("--run", f"{named} is not going on in this cluster (going on: {there}); {hint}")])
    return named
