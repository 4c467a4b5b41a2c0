"""A publish that engines failed in is begun anew, where that can help: the transfer broke with them, for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Protocol

from orchestrator.publish import Published, Publisher
from orchestrator.roster import NoEngineLeft
from orchestrator.waiting import WorkerFailed
from workers.weights.errors import TransportError

TRIES = 3
"""Of one publish, by the same engines. An engine that died is another case: those that replace it are bounded."""


class Engines(Protocol):
    def reconcile(self) -> tuple[str, ...]:
        """Raises when none is left."""

    def dead_engines(self) -> tuple[str, ...]: ...


def publish(
    publisher: Publisher, engines: Engines, casualties: Callable[[], Mapping[str, str]], mint: Callable[[], str]
) -> Published:
    """Publish under an id of `mint`, and under others while only engines fail. `casualties`: ranks that have failed.

    Raises what `Publisher.publish` does.
    """
    for tried in count(1):
        dead = engines.dead_engines()
        try:
            return publisher.publish(mint())
        except WorkerFailed as error:
            if casualties():
                raise
            engines.reconcile()
            some_died = engines.dead_engines() != dead
            if not some_died and (tried >= TRIES or not isinstance(error.raised, TransportError | NoEngineLeft)):
                raise
    raise AssertionError("counted to the end")
