"""What lives as long as a run: the cluster, room in it, the rollout manager with its engines, the inspector's page."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from orchestrator.config import Config
from orchestrator.inspector.access import FILE
from orchestrator.inspector.actor import NAME, Inspector
from orchestrator.joining import require_cluster
from orchestrator.manager_client import ManagerClient, engine_options
from orchestrator.placement import Placement, place
from orchestrator.rollout_manager import ManagerSpec
from orchestrator.running import drain
from orchestrator.running.interrupts import Stop, raise_on_sigterm
from orchestrator.running.run_dir import RunDir, config_hash
from orchestrator.tracking.prometheus import PrometheusTracker
from orchestrator.waiting import wait_for
from state.errors import SlotwiseError
from workers.metrics import MetricSink

LOOPBACK = "127.0.0.1"
ACTOR_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Of every actor, where the user has not set them."""
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
LOCAL_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE}
"""In a cluster of our own, beside it: process groups listen on loopback alone."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunScope:
    """`host`: the address that the nodes reach each other by, where that is not each node's own. `manager`: None where
    no rollouts are generated."""

    config: Config
    console: Console
    host: str | None
    placement: Placement
    manager: ManagerClient | None
    inspector: Any
    metrics: PrometheusTracker
    stop: Stop

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


@contextmanager
def opened(config: Config, run_dir: RunDir, console: Console) -> Iterator[RunScope]:
    """Everything that a gang needs around it; all of it ends with the `with`."""
    with ExitStack() as undo:
        host = undo.enter_context(_cluster(config))
        sink = MetricSink(config.run.name)
        undo.callback(sink.close)
        run_dir.journal.listen(sink.journaled)
        placement = place(config)
        undo.callback(placement.remove)
        placement.wait(config, console.print)
        manager = None
        if config.debug.load_rollouts is None:
            options = engine_options(placement, config.rollout.num_engines)
            manager = ManagerClient(ManagerSpec(config, str(run_dir.path), options))
            undo.callback(_quietly, manager.shutdown)
        inspector = undo.enter_context(_inspector(config, run_dir, manager))
        saves = config.checkpoint.save_interval is not None
        stop = Stop(config.checkpoint.stop_deadline_s if saves else 0.0)
        if saves:
            undo.enter_context(drain.watching(stop, lambda: drain.look(placement)))
        metrics = PrometheusTracker(config.run.name, sink)
        yield RunScope(config, console, host, placement, manager, inspector, metrics, stop)


@contextmanager
def _inspector(config: Config, run_dir: RunDir, manager: ManagerClient | None) -> Iterator[Any]:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # where the journals are
    inspector = Inspector.options(  # type: ignore[attr-defined]
        name=f"{config.run.name}/{NAME}", namespace=config.run.name, scheduling_strategy=here
    ).remote(config.run.name, str(run_dir.path), manager and manager.handle)
    try:
        listen = (config.cluster.inspector_host, config.cluster.inspector_port)
        try:
            wait_for(inspector.start.remote(*listen), "the inspector", "start", 60.0)
        except SlotwiseError as error:
            logger.warning("the run goes on without its page: %s", error)
        yield inspector
    finally:
        (run_dir.path / FILE).unlink(missing_ok=True)
        ray.kill(inspector)


@contextmanager
def _cluster(config: Config) -> Iterator[str | None]:
    """Join a Ray cluster, or start one that ends with the run. Yields the address its nodes reach each other by:
    loopback for a single node, None otherwise."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    if address:
        named = "cluster.address" if config.cluster.address else "RAY_ADDRESS"
        require_cluster(address, named, "start one there (ray start --head), or leave it out: the run starts its own")
    local = {} if address else {"include_dashboard": False}
    wanted = ACTOR_ENVIRONMENT | ({} if address else LOCAL_ENVIRONMENT)
    defaults = {name: value for name, value in wanted.items() if name not in os.environ}
    ray.init(
        address=address or "local",
        namespace=config.run.name,
        runtime_env={"env_vars": defaults},
        job_config=JobConfig(metadata={"run": config.run.name, "config_hash": config_hash(config)}),
        configure_logging=False,
        log_to_driver=False,
        **local,
    )
    raise_on_sigterm()
    try:
        yield LOOPBACK if len([n for n in ray.nodes() if n["Alive"]]) == 1 else None
    finally:
        ray.shutdown()


def _quietly(end: object) -> None:
    """Ending what may be gone already must not hide why."""
    assert callable(end)
    with suppress(SlotwiseError):
        end()
