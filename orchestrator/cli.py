"""The `slotwise` command. What a command needs is imported when it runs, so that wrong options are refused at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from orchestrator.batching import num_rollouts
from orchestrator.checks import configuration, prompts, surroundings
from orchestrator.commands.command_line import parser, print_anything, print_json, reader_may_leave, version
from orchestrator.config import Config
from orchestrator.data import horizon
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.options.load import Resolved, nearest, resolve, to_yaml
from orchestrator.options.problems import ConfigError, Problem
from orchestrator.resume import resuming, slot_plan
from orchestrator.resume.slot_plan import SlotLoad
from orchestrator.running import run_lock
from orchestrator.running.interrupts import raise_on_sigterm
from state.resume import LoadSpec, ResumePlan

_USAGE = """\
usage: slotwise COMMAND ...

  train CONFIG.yaml [--section.key value ...] [--dry-run] [--json]   run, or continue, a training
  slots [--run R] [--address A] [--watch] [--json]                   which weights are live on every rank and engine
  inspect RUN_DIR [--port P]                                         the same over time, as a page, from the journals
  audit RUN_DIR [--timeline] [--json]                                replay a run's journals and check the invariants
  convert SOURCE OUT                                                 Hugging Face -> native checkpoint, and back
  diagram                                                            the state machine as Mermaid
  submit CONFIG.yaml --address A [--follow] [--print] [--section.key value ...]   train as a job of a Ray cluster
  render CONFIG.yaml [--overlay O] [--check [--crds PATH]] [--section.key value ...]   its manifests for KubeRay
  doctor [--json]                                                    what this machine can run, and what is missing

`slotwise COMMAND --help` says more, and `slotwise --version` which one this is. Exit codes: 0 done, 2 configuration,
3 resume, 4 a slot invariant was violated, 5 a worker or engine failed, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    print_anything()
    code: int = ExitCode.DONE
    try:
        # A run goes on, whoever reads what it says; and its own broken pipes are failures.
        runs = arguments[:1] == ["train"] and not {"--dry-run", "--help", "-h"} & set(arguments)
        with nullcontext() if runs else reader_may_leave():
            code = _command(arguments)
        return code
    except SystemExit:
        raise  # argparse has printed its help
    except BaseException as error:
        return _report(error, as_json=arguments[:1] == ["train"] and "--json" in arguments)


def _command(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        return ExitCode.DONE
    if name == "--version":
        print(f"slotwise {version()}")
        return ExitCode.DONE
    if name not in _COMMANDS:
        what = f"there is no such command{nearest(name, _COMMANDS)}" if name else "no command given"
        raise ConfigError([Problem(name or "slotwise", f"{what}; commands: {', '.join(_COMMANDS)}")])
    return _COMMANDS[name](rest)


def _report(error: BaseException, as_json: bool) -> int:
    code = exit_code(error)
    match code:
        case ExitCode.INTERRUPTED:
            print("interrupted" + (f": {error}" if str(error) else ""), file=sys.stderr)
        case ExitCode.CONFIG if isinstance(error, ConfigError):
            if as_json:
                print_json(
                    {"problems": [{"key": p.key, "where": p.where, "message": p.message} for p in error.problems]}
                )
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
        case ExitCode.RESUME:
            print(f"error: {error}", file=sys.stderr)
        case _:
            traceback.print_exception(error)
            if code is ExitCode.INVARIANT:
                print(f"error: a slot invariant was violated: {error}", file=sys.stderr)
    return code


def _train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        from orchestrator.options.help import train_help

        print(train_help())
        return ExitCode.DONE
    dry_run, as_json = "--dry-run" in arguments, "--json" in arguments
    arguments = [argument for argument in arguments if argument not in ("--dry-run", "--json")]
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError([Problem("CONFIG.yaml", "comes first: slotwise train CONFIG.yaml [--section.key value ...]")])
    resolved = resolve(Path(arguments[0]), arguments[1:])
    config = _checked(resolved)
    if dry_run:
        plan, auxiliary = _planned(config)
        _print_dry_run(config, plan, auxiliary, as_json)
        return ExitCode.DONE
    raise_on_sigterm()
    with run_lock.alone(config):
        plan, auxiliary = _planned(config)
        _print_start(config, plan, auxiliary)
        _refuse(resolved, prompts.problems(config))
        from orchestrator.running.run import train

        train(config, plan)
    return ExitCode.DONE


def _planned(config: Config) -> tuple[ResumePlan, Sequence[SlotLoad]]:
    """What each slot starts from; warns of what is doubtful about it."""
    plan = resuming.plan(config)
    auxiliary = slot_plan.auxiliary(config, plan)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return plan, auxiliary


def _checked(resolved: Resolved) -> Config:
    config = resolved.config
    _refuse(resolved, (*configuration.problems(config), *surroundings.problems(config, surroundings.here(config))))
    return config if config.loop.num_epoch is None else _settled(resolved)


def _settled(resolved: Resolved) -> Config:
    """With its epochs counted, which says more about what cannot be right."""
    from orchestrator.data.rows import DataError
    from orchestrator.data.tokenizer import TokenizerError

    config = resolved.config
    try:
        settled = horizon.settled(config)
    except (DataError, TokenizerError) as error:
        _refuse(resolved, [Problem("data.path", f"loop.num_epoch cannot be counted: {error}")])
        raise
    print(
        f"loop.num_epoch {config.loop.num_epoch} of {config.data.path}: {num_rollouts(settled)} rollouts",
        file=sys.stderr,
    )
    _refuse(resolved, configuration.problems(settled))
    return settled


def _refuse(resolved: Resolved, problems: Iterable[Problem]) -> None:
    if found := [resolved.located(problem) for problem in problems]:
        raise ConfigError(found)


def _print_dry_run(config: Config, plan: ResumePlan, auxiliary: Sequence[SlotLoad], as_json: bool) -> None:
    if as_json:
        loads = {"actor": _load_json(plan.load)} | {str(one): _load_json(one.load) for one in auxiliary}
        if plan.critic is not None:
            loads["critic"] = _load_json(plan.critic.load)
        print_json({"config": config.model_dump(mode="json"), "resume": plan.to_json(), "loads": loads})
        return
    print(to_yaml(config))
    _print_start(config, plan, auxiliary)


def _print_start(config: Config, plan: ResumePlan, auxiliary: Sequence[SlotLoad]) -> None:
    first, total = plan.start_rollout_id + 1, num_rollouts(config)
    begins = f"starts with rollout {first}/{total}" if first <= total else f"has no rollout to do of {total}"
    print(f"# {begins}: {plan.reason}")
    print(f"# actor: {plan.load}")
    for one in auxiliary:
        print(f"# {one}: {one.load}")
    if plan.critic is not None:
        print(f"# critic: {plan.critic}")
    if first > total > 0:
        print("# every rollout is done already; a larger loop.num_rollout or num_epoch goes on from here", flush=True)


def _load_json(load: LoadSpec) -> dict[str, Any]:
    about = {"kind": load.kind, "path": load.path, "iteration": load.iteration}
    return about if load.part is None else about | {"part": load.part}


def _slots(arguments: list[str]) -> int:
    from orchestrator.commands import slots

    return slots.main(arguments)


def _inspect(arguments: list[str]) -> int:
    from orchestrator.commands import inspect

    return inspect.main(arguments)


def _audit(arguments: list[str]) -> int:
    from orchestrator.commands import audit

    return audit.main(arguments)


def _convert(arguments: list[str]) -> int:
    from orchestrator.commands import convert

    return convert.main(arguments)


def _diagram(arguments: list[str]) -> int:
    parser("diagram", "The state machine of a training worker, as Mermaid.").parse_args(arguments)
    from state.lifecycle import mermaid

    print(mermaid(), end="")
    return ExitCode.DONE


def _doctor(arguments: list[str]) -> int:
    from orchestrator.commands import doctor

    return doctor.main(arguments)


def _submit(arguments: list[str]) -> int:
    from orchestrator.commands import submit

    return submit.main(arguments)


def _render(arguments: list[str]) -> int:
    from orchestrator.commands import render

    return render.main(arguments)


_COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "train": _train,
    "slots": _slots,
    "inspect": _inspect,
    "audit": _audit,
    "convert": _convert,
    "diagram": _diagram,
    "submit": _submit,
    "render": _render,
    "doctor": _doctor,
}
