"""What lives as long as a gang: its ranks, the loop that drives them, and whatever depends on where it starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import ray

from orchestrator.engines import engine_processes
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.loops import train_loop
from orchestrator.manager_client import PATIENCE_S
from orchestrator.publish import Publisher
from orchestrator.resume import continuity, data_state
from orchestrator.resume.resuming import continues_itself
from orchestrator.rollouts.saved import SavedRollouts
from orchestrator.running.debug_runs import ReplayRun, RolloutOnlyRun
from orchestrator.running.gang_specs import critic_specs, worker_specs
from orchestrator.running.gangs import Gangs
from orchestrator.running.live_run import LiveRun
from orchestrator.running.rebuilding import Failure, Situation, decide
from orchestrator.running.run_dir import RunDir, config_hash
from orchestrator.running.run_scope import RunScope
from orchestrator.tracking.base import Tracker, Trackers
from orchestrator.tracking.opening import open_trackers
from orchestrator.train_group import TrainGroup
from orchestrator.waiting import WorkerFailed
from state import checkpoints
from state.gang import GangId
from state.resume import ResumePlan


def work(run: RunScope, run_dir: RunDir, plan: ResumePlan, earlier: tuple[Failure, ...]) -> Failure | None:
    """Build a gang from where `plan` says, and drive it to the last rollout; it has ended when this returns.

    Returns None then, or the failure that it is to be rebuilt after; raises what ends the run. `earlier`: failures that
    gangs of this process were rebuilt after.
    """
    config = run.config
    with ExitStack() as undo:
        steps, evals = open_trackers(config, plan.start_rollout_id, run_dir.path, run.console)
        undo.callback(steps.close)
        undo.callback(evals.close)
        run.placement.wait(config, run.say)
        gang_id = GangId(config.train.num_workers, run_dir.incarnation, config_hash(config))
        gangs = _gangs(run, plan, gang_id, str(run_dir.path), undo)
        live: LiveRun | None = None
        try:
            live = _live(run, run_dir, plan, gang_id, gangs, Trackers([steps, run.metrics]), evals)
            with run.stop.listening():
                train_loop(live, config, plan.start_rollout_id)
            return None
        except Exception as error:
            if isinstance(error, WorkerFailed):  # at once: what follows may take a while
                run.say(f"error: {error}")
            trained = 0 if live is None else live.trained
            ranks, failure = _failure(run, gangs, error, plan.start_rollout_id + trained)
            started = live is not None or bool(earlier)
            budget = config.cluster.max_gang_restarts
            verdict = decide(Situation(failure, earlier, budget, started, trained, continues_itself(config)))
            if failure.of_gang:
                run_dir.gang_failed(ranks, f"{type(error).__name__}: {error}", verdict)
            if not verdict.rebuild:
                if failure.of_gang:
                    error.add_note(f"the gang is not built anew: {verdict.why}")
                raise
            found = "".join(f"\n{name}: {why.splitlines()[0]}" for name, why in ranks.items())
            run.say(f"the gang is built anew ({verdict.why}){found}")
    if run.manager is not None:
        run.manager.abandon(f"the gang of incarnation {run_dir.incarnation} failed")
    return failure


def _gangs(run: RunScope, plan: ResumePlan, gang_id: GangId, run_dir: str, undo: ExitStack) -> Gangs:
    """Their processes, which end with `undo`."""
    config, critic = run.config, None
    if config.algorithm.needs_critic:
        critic = TrainGroup(critic_specs(config, plan, gang_id, run_dir, run.host), run.placement)
        undo.callback(critic.kill)
    actor = TrainGroup(worker_specs(config, plan, gang_id, run_dir, run.host), run.placement)
    undo.callback(actor.kill)
    return Gangs(actor, critic, config.train.timeout_s)


def _failure(run: RunScope, gangs: Gangs, error: Exception, rollout_id: int) -> tuple[Mapping[str, str], Failure]:
    """What has failed, and by name the ranks that were found dead or poisoned."""
    code = ExitCode.INTERRUPTED if run.stop.asked else exit_code(error)
    failed = error.workers if isinstance(error, WorkerFailed) else ()
    ranks = gangs.casualties()
    of_gang = bool(ranks) or any(name in gangs.handles for name in failed)
    kind = error.kind if isinstance(error, WorkerFailed) else type(error).__name__
    return ranks, Failure(code, of_gang, kind, rollout_id)


def _live(
    run: RunScope,
    run_dir: RunDir,
    plan: ResumePlan,
    gang_id: GangId,
    gangs: Gangs,
    steps: Tracker,
    evals: Tracker,
) -> LiveRun:
    """Bring the gangs up, and what they train on."""
    config, resumed = run.config, continuity.expected(run.config, plan)
    run.inspector.follow.remote(gangs.handles)  # nothing waits for a page
    begins_at = (plan.start_rollout_id, _data_state(plan))
    if run.manager is None:
        saved = SavedRollouts(config, *begins_at, ray.put)
        gangs.init()
        run_dir.gang_started(gang_id, plan)
        return ReplayRun(config, run_dir, gangs, saved, steps, evals, run.stop, resumed)
    manager = run.manager.beside(gangs.lifelines)
    opened = manager.begin(*begins_at)
    gangs.init()
    run_dir.gang_started(gang_id, plan)
    manager.wait_started()
    opened()
    limits = (config.weights.bucket_bytes, config.weights.timeout_s + PATIENCE_S, engine_processes(config))
    publisher = Publisher(gangs.actor, manager, run_dir.journal, *limits)
    kind = RolloutOnlyRun if config.debug.rollout_only else LiveRun
    return kind(config, run_dir, gangs, manager, publisher, steps, evals, run.stop, resumed)


def _data_state(plan: ResumePlan) -> dict[str, Any] | None:
    """Where data continues from; None for its beginning."""
    if not plan.load_data:
        return None
    assert plan.path is not None
    assert plan.iteration is not None
    return data_state.read(checkpoints.iteration_dir(plan.path, plan.iteration))
