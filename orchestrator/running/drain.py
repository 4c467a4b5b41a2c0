"""A node that is about to be taken away (preemption, scale-down): the run ends by itself while it can still save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from ray._private.state import state as cluster_state
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from orchestrator.placement import Placement
from orchestrator.running.interrupts import Stop

LOOK_EVERY_S = 2.0
NO_DEADLINE_S = 1e9
logger = logging.getLogger(__name__)


def next_drained(draining: Mapping[str, int], ours: Collection[str], now_s: float) -> tuple[str, float] | None:
    """Of the nodes that hold something of ours, the one that ends first, and in how many seconds.

    `draining`: wall time in milliseconds by node id; 0: without a deadline.
    """
    left = {node: at / 1000 - now_s if at else NO_DEADLINE_S for node, at in draining.items() if node in ours}
    first = min(left, key=lambda node: left[node], default=None)
    return None if first is None else (first, max(1.0, left[first]))


def look(placement: Placement) -> tuple[str, float] | None:
    """Ray says which nodes are draining to nobody but its own libraries; they ask it like this."""
    draining: Mapping[str, int] = cluster_state.get_draining_nodes()
    if not draining:
        return None
    ours = placement_group_table(placement.group)["bundles_to_node_id"].values()
    return next_drained(draining, set(ours), time.time())


@contextmanager
def watching(stop: Stop, looks: Callable[[], tuple[str, float] | None]) -> Iterator[None]:
    """Inside, `stop` is asked for when a node of ours is being drained."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            try:
                found = looks()
            except (RayError, RuntimeError, ConnectionError):
                logger.exception("cannot tell which nodes are being drained")
                return
            if found is not None:
                node, left_s = found
                stop.ask(f"node {node[:12]} is being taken away", left_s)
                return

    thread = threading.Thread(target=watch, name="drain", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_EVERY_S)
