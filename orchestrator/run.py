"""One run from start to end: sets everything up, drives the loop, and leaves no process behind."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from orchestrator import continuity, slot_plan
from orchestrator.batching import steps_per_rollout
from orchestrator.config import Config
from orchestrator.debug_runs import ReplayRun, RolloutOnlyRun
from orchestrator.engines import engine_processes
from orchestrator.inspector.access import FILE
from orchestrator.inspector.actor import NAME, Inspector
from orchestrator.interrupts import Stop, raise_on_sigterm
from orchestrator.live_run import LiveRun
from orchestrator.loops import train_loop
from orchestrator.manager_client import ManagerClient, engine_options
from orchestrator.placement import Placement, place
from orchestrator.publish import Publisher
from orchestrator.rollout_manager import ManagerSpec
from orchestrator.run_dir import RunDir, config_hash
from orchestrator.saved_rollouts import SavedRollouts
from orchestrator.tracking.base import Trackers
from orchestrator.tracking.opening import open_trackers
from orchestrator.tracking.prometheus import PrometheusTracker
from orchestrator.train_group import TrainGroup
from orchestrator.waiting import wait_for
from state import checkpoints
from state.errors import SlotwiseError
from state.gang import GangId
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot, Tier, WorkerId
from workers.megatron.spec import SlotSpec, WorkerSpec
from workers.metrics import MetricSink

LOOPBACK = "127.0.0.1"
ACTOR_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Of every actor, where the user has not set them."""
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
LOCAL_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE}
"""In a cluster of our own, beside it: process groups listen on loopback alone."""

logger = logging.getLogger(__name__)


def train(config: Config, plan: ResumePlan) -> None:
    """Run `config` from where `plan` says, until its last rollout. Raises what ended it early."""
    console = Console(highlight=False)
    run_dir = RunDir.open(config, plan)
    console.print(f"run {config.run.name} in {run_dir.path}")
    with ExitStack() as undo:
        undo.enter_context(run_dir.recording())
        steps, evals = open_trackers(config, plan.start_rollout_id, run_dir.path, console)
        undo.callback(steps.close)
        undo.callback(evals.close)
        saved = _saved_rollouts(config, plan)
        host = undo.enter_context(_cluster(config))
        sink = MetricSink(config.run.name)
        undo.callback(sink.close)
        run_dir.journal.listen(sink.journaled)
        steps = Trackers([steps, PrometheusTracker(config.run.name, sink)])
        placement = place(config, console.print)
        undo.callback(placement.remove)
        manager = None
        if saved is None:
            manager = ManagerClient(_manager_spec(config, plan, run_dir, placement))
            undo.callback(_quietly, manager.shutdown)
        gang_id = GangId(config.train.num_workers, run_dir.incarnation, config_hash(config))
        gang = TrainGroup(worker_specs(config, plan, gang_id, str(run_dir.path), host), placement)
        undo.callback(gang.kill)
        undo.callback(_start_inspector(config, run_dir, gang, manager))
        gang.init()
        run_dir.gang_started(gang_id, plan)
        stop = Stop(config.checkpoint.stop_deadline_s if config.checkpoint.save_interval is not None else 0.0)
        resumed = continuity.expected(config, plan)
        if manager is None:
            assert saved is not None
            live: LiveRun = ReplayRun(config, run_dir, gang, saved, steps, evals, stop, resumed)
        else:
            manager.wait_started()
            limits = (config.weights.bucket_bytes, config.weights.timeout_s, engine_processes(config))
            publisher = Publisher(gang, manager, run_dir.journal, *limits)
            kind = RolloutOnlyRun if config.debug.rollout_only else LiveRun
            live = kind(config, run_dir, gang, manager, publisher, steps, evals, stop, resumed)
        with stop.listening():
            train_loop(live, config, plan.start_rollout_id)
    console.print(
        f"done. Which weights were where: slotwise slots --run {run_dir.path}\n"
        f"Every promise re-checked: slotwise audit {run_dir.path}"
    )


def worker_specs(config: Config, plan: ResumePlan, gang: GangId, run_dir: str, host: str | None) -> list[WorkerSpec]:
    """What each rank is told."""
    slots = [SlotSpec(Slot.ACTOR, plan.load, _version(plan.load, plan), Tier.COPY)]
    tiers = {Slot.REF: config.ref.tier, Slot.TEACHER: config.teacher.tier, Slot.OLD_ACTOR: Tier.COPY}
    for one in slot_plan.auxiliary(config, plan):
        slots.append(SlotSpec(one.slot, one.load, one.version, Tier(tiers[one.slot])))
    return [
        WorkerSpec(
            worker=WorkerId(config.run.name, Slot.ACTOR, rank),
            gang=gang,
            run_dir=run_dir,
            host=host,
            seed=config.run.seed,
            slots=tuple(slots),
            load_optimizer=plan.load_optimizer,
            load_rng=plan.load_rng,
            total_steps=config.loop.num_rollout * steps_per_rollout(config),
            temperature=config.rollout.temperature,
            max_response_len=config.rollout.max_response_len,
            keep_old_actors=slot_plan.keep_old_actors(config),
            ref_update_interval=config.ref.update_interval if config.algorithm.needs_ref else None,
            model=config.model,
            train=config.train,
            algorithm=config.algorithm,
            weights=config.weights,
        )
        for rank in range(config.train.num_workers)
    ]


def _version(load: LoadSpec, plan: ResumePlan) -> int:
    """Rollout steps that the actor's weights were trained for; weights without their optimizer start a new count."""
    return load.iteration + 1 if load.iteration is not None and plan.load_optimizer else 0


def _manager_spec(config: Config, plan: ResumePlan, run_dir: RunDir, placement: Placement) -> ManagerSpec:
    options = engine_options(placement, config.rollout.num_engines)
    return ManagerSpec(config, str(run_dir.path), plan.start_rollout_id, _data_state(plan), options)


def _saved_rollouts(config: Config, plan: ResumePlan) -> SavedRollouts | None:
    """What to train on instead of generating it, where that is asked for."""
    if config.debug.load_rollouts is None:
        return None
    return SavedRollouts(config, plan.start_rollout_id, _data_state(plan), ray.put)


def _data_state(plan: ResumePlan) -> dict[str, Any] | None:
    """Where data continues from; None for its beginning."""
    if not plan.load_data:
        return None
    assert plan.path is not None
    assert plan.iteration is not None
    return checkpoints.read_data(checkpoints.iteration_dir(plan.path, plan.iteration))


def _start_inspector(
    config: Config, run_dir: RunDir, gang: TrainGroup, manager: ManagerClient | None
) -> Callable[[], None]:
    """Returns what ends it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # where the journals are
    inspector = Inspector.options(  # type: ignore[attr-defined]
        name=f"{config.run.name}/{NAME}", namespace=config.run.name, scheduling_strategy=here
    ).remote(config.run.name, str(run_dir.path), gang.handles, manager and manager.handle)
    listen = (config.cluster.inspector_host, config.cluster.inspector_port)
    try:
        wait_for(inspector.start.remote(*listen), "the inspector", "start", 60.0)
    except SlotwiseError as error:
        logger.warning("the run goes on without its page: %s", error)

    def end() -> None:
        (run_dir.path / FILE).unlink(missing_ok=True)
        ray.kill(inspector)

    return end


@contextmanager
def _cluster(config: Config) -> Iterator[str | None]:
    """Join a Ray cluster, or start one that ends with the run. Yields the address its nodes reach each other by:
    loopback for a single node, None otherwise."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
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
