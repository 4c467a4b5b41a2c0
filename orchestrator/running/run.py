"""One run from start to end: a gang, and after a failure another one. Leaves no process behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console

from orchestrator.batching import num_rollouts
from orchestrator.config import Config
from orchestrator.resume import resuming
from orchestrator.running import run_scope
from orchestrator.running.gang_scope import work
from orchestrator.running.interrupts import Terminated
from orchestrator.running.rebuilding import Failure
from orchestrator.running.run_dir import RunDir
from state.errors import ResumeError
from state.resume import ResumePlan


def train(config: Config, plan: ResumePlan) -> None:
    """Run `config` from where `plan` says, until its last rollout. Raises what ended it early."""
    console = Console(highlight=False)
    run_dir = RunDir.open(config, plan)
    ranks = _count(config.train.num_workers, "training rank") + (
        " of each role" if config.algorithm.needs_critic else ""
    )
    engines = _count(config.rollout.num_engines if config.debug.load_rollouts is None else 0, "engine")
    console.print(f"run {config.run.name} in {run_dir.path}: starting {ranks}, {engines}", soft_wrap=True)
    with _telling_how_to_go_on(config, console), ExitStack() as undo:
        undo.enter_context(run_dir.recording())
        run = undo.enter_context(run_scope.opened(config, run_dir, console))
        failures: tuple[Failure, ...] = ()
        while (failure := work(run, run_dir, plan, failures)) is not None:
            failures = (*failures, failure)
            plan = resuming.plan(config)
            for warning in plan.warnings:
                run.say(f"warning: {warning}")
            run.say(f"continuing at rollout {plan.start_rollout_id} of {num_rollouts(config)}: {plan.reason}")
            run_dir = run_dir.next(plan)
    console.print(
        f"done. Which weights were where:\n  slotwise slots --run {run_dir.path}\n"
        f"Every promise re-checked:\n  slotwise audit {run_dir.path}",
        soft_wrap=True,
    )


@contextmanager
def _telling_how_to_go_on(config: Config, console: Console) -> Iterator[None]:
    """Whoever interrupts a run is told where the same command continues it."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        if resuming.continues_itself(config):
            with suppress(ResumeError):  # what is wrong with a checkpoint is said by the next start
                first = resuming.plan(config).start_rollout_id + 1
                console.print(f"the same command goes on with rollout {first}/{num_rollouts(config)}", markup=False)
        raise


def _count(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'' if number == 1 else 's'}"
