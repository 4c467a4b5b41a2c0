"""Configurations that are right by themselves but cannot work where the command was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from orchestrator.checks import model
from orchestrator.config import Config
from orchestrator.data import context
from orchestrator.data.path import DataPathError, parse
from orchestrator.options.imports import is_import_path, missing
from orchestrator.options.problems import Problem


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the command runs."""

    in_ray_job: bool
    """The working directory is a copy that Ray throws away with the job."""
    on_one_machine: bool
    """No cluster is joined, so that what this machine does not have nobody has."""

    @staticmethod
    def of(environment: Mapping[str, str], cwd: Path, address: str | None) -> Surroundings:
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in environment or "runtime_resources" in cwd.parts
        return Surroundings(in_job, not in_job and address in (None, "local") and "RAY_ADDRESS" not in environment)


def here(config: Config) -> Surroundings:
    """The surroundings of this process."""
    return Surroundings.of(os.environ, Path.cwd(), config.cluster.address)


def problems(config: Config, surroundings: Surroundings) -> tuple[Problem, ...]:
    """What cannot work here."""
    found = [*_packages(config), *model.of_files(config), *model.vocabulary(config)]
    found += context.problems(config)
    if surroundings.in_ray_job:
        found += thrown_away(config)
    if surroundings.on_one_machine:
        found += _missing(config)
    return tuple(found)


def _packages(config: Config) -> Iterator[Problem]:
    """The driver runs here, so its packages must be here."""
    asked = (
        ("tracking.wandb.mode", config.tracking.wandb.mode != "disabled", "wandb"),
        ("tracking.tensorboard", config.tracking.tensorboard, "tensorboard"),
    )
    for key, wanted, package in asked:
        if wanted and find_spec(package) is None:
            yield Problem(key, f'needs the package {package}: pip install "slotwise[{package}]"')
    if find_spec("pyarrow") is None:
        for key, path in _data_paths(config):
            if path.suffix == ".parquet" or path.is_dir():
                yield Problem(key, f'{path} needs the package pyarrow: pip install "slotwise[parquet]"')


def thrown_away(config: Config) -> Iterator[Problem]:
    """Paths that a Ray job must not use."""
    why = (
        "in a Ray job the working directory is a copy that is deleted with the job, so what is written there is lost "
        "and an earlier run's files are not there; give an absolute path on storage that all nodes share"
    )
    if config.run.dir is None:
        yield Problem("run.dir", f"defaults to runs/{config.run.name}, which is relative: {why}")
    given = (
        ("run.dir", config.run.dir),
        ("checkpoint.save", config.checkpoint.save),
        ("checkpoint.save_hf", config.checkpoint.save_hf),
        ("debug.save_rollouts", config.debug.save_rollouts),
        ("debug.load_rollouts", config.debug.load_rollouts),
        ("checkpoint.load", config.checkpoint.load),
        ("ref.load", config.ref.load),
        ("teacher.load", config.teacher.load),
        ("critic.load", config.critic.load),
        ("critic.save", config.critic.save),
    )
    for key, path in given:
        if path is not None and not Path(path).is_absolute():
            yield Problem(key, f"{path} is relative: {why}")


def _missing(config: Config) -> Iterator[Problem]:
    for key, name in _code(config):
        if lacking := missing(name, [str(Path.cwd()), *sys.path]):
            yield Problem(key, lacking)
    for key, path in _data_paths(config):
        if not path.exists():
            yield Problem(key, f"{path} does not exist{_near(str(path))}")
    model, replayed = config.model, config.debug.load_rollouts
    if replayed is not None and not Path(replayed).is_dir():
        yield Problem("debug.load_rollouts", f"{replayed} is not a directory{_near(replayed)}")
    if model.hf_checkpoint is not None and not (Path(model.hf_checkpoint) / "config.json").is_file():
        yield Problem("model.hf_checkpoint", f"{model.hf_checkpoint} holds no config.json{_near(model.hf_checkpoint)}")
    if model.tokenizer is not None and not Path(model.tokenizer).is_dir():
        yield Problem("model.tokenizer", f"{model.tokenizer} is not a directory{_near(model.tokenizer)}")


def _code(config: Config) -> Iterator[tuple[str, str]]:
    """Functions of the user's."""
    evaluation = config.eval
    named = {
        "reward.name": config.reward.name,
        "rollout.filter": config.rollout.filter,
        "rollout.generate": config.rollout.generate,
        "data.generator": config.data.generator,
        "eval.reward.name": evaluation.reward.name if evaluation.reward is not None else None,
        "eval.data.generator": evaluation.data.generator if evaluation.data is not None else None,
        "train.setup_hook": config.train.setup_hook,
    }
    yield from ((key, name) for key, name in named.items() if name is not None and is_import_path(name))


def _data_paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Those that can be understood; the others are said to be wrong already."""
    for key, data in (("data.path", config.data), ("eval.data.path", config.eval.data)):
        if data is not None and data.path is not None:
            with suppress(DataPathError):
                yield key, parse(data.path).path


def _near(path: str) -> str:
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"
