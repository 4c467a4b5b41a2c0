"""Which data options cannot be right. Pure: looks at values alone."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config import Config, DataConfig
from orchestrator.data.path import DataPathError, parse
from orchestrator.options.problems import Problem
from orchestrator.rewards.registry import REWARDS


def check(config: Config) -> Iterator[Problem]:
    """Of training; `source` is for evaluation too."""
    yield from source("data", config.data, needed=config.loop.num_rollout != 0)
    if config.loop.num_rollout != 0 and config.reward.name is None:
        yield Problem(
            "reward.name", f"needed for training; registered: {', '.join(REWARDS)}, or package.module:function"
        )


def source(section: str, data: DataConfig, needed: bool) -> Iterator[Problem]:
    """Where prompts come from."""
    if data.path is not None and data.generator is not None:
        yield Problem(f"{section}.generator", f"give this or {section}.path, not both")
    if data.path is None and data.generator is None and needed:
        yield Problem(f"{section}.path", f"no prompts: give this (a file of rows) or {section}.generator")
    if data.path is not None:
        try:
            parse(data.path)
        except DataPathError as error:
            yield Problem(f"{section}.path", str(error))
