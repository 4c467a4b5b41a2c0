"""Directories that a run writes to must not be inside each other: what one part clears or deletes, another needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator.config import Config
from orchestrator.options.problems import Problem
from orchestrator.resume import resuming
from orchestrator.running import exporting

_OF_THE_RUN = {
    "journal": "where this run keeps its journals",
    "logs": "where the engines of this run write their logs",
    "tensorboard": "where this run writes for TensorBoard",
    "wandb": "where this run writes for W&B",
}


def check(config: Config) -> Iterator[Problem]:
    """Every directory that an option names, against those that have another use. Pure: compares names alone."""
    run_dir, checkpoint = resuming.run_dir(config), config.checkpoint
    uses = {run_dir / name: use for name, use in _OF_THE_RUN.items()}
    given = {
        "checkpoint.save": checkpoint.save,
        "critic.save": config.critic.save,
        "checkpoint.save_hf": None if checkpoint.save_hf is None else str(exporting.directory(config, 0)),
        "debug.save_rollouts": config.debug.save_rollouts,
        "weights.directory": config.weights.directory,
    }
    for option, path in given.items():
        for directory, use in uses.items():
            if path and _is_inside(path, directory):
                yield Problem(
                    option, f"{path} is in {directory}, {use}; give a directory of its own, such as {run_dir / 'NAME'}"
                )
    roots = {"checkpoint.save": resuming.save_root(config), "critic.save": resuming.critic_save_root(config)}
    for option, path in given.items():
        for whose, saves in roots.items():
            told = option == "checkpoint.save" and saves == roots[option]  # of the critic's, which is the same
            if path and not told and option != whose and saves is not None and _is_inside(path, saves):
                yield Problem(
                    option,
                    f"{path} is in {saves}, where this run saves checkpoints and old ones are deleted; give one of its "
                    f"own, such as {run_dir / 'NAME'}",
                )
                break


def _is_inside(path: str, directory: Path) -> bool:
    """Whether `path` is `directory` or below it."""
    return Path(os.path.normpath(directory)) in (child := Path(os.path.abspath(path)), *child.parents)
