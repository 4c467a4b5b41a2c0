"""Where a run exports Hugging Face directories to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.config import Config
from orchestrator.options.problems import Problem
from orchestrator.resume import resuming

ROLLOUT_ID = "{rollout_id}"


def directory(config: Config, rollout_id: int) -> Path:
    """Absolute directory of the export after `rollout_id`."""
    given = config.checkpoint.save_hf
    if given is None:
        return resuming.run_dir(config) / "huggingface" / str(rollout_id)
    return Path(given.replace(ROLLOUT_ID, str(rollout_id))).absolute()


def check(config: Config) -> Iterator[Problem]:
    """What is wrong with the options of exports. Pure."""
    checkpoint = config.checkpoint
    if checkpoint.save_hf is None:
        return
    if checkpoint.save_hf_interval is None:
        yield Problem("checkpoint.save_hf", "is set, but nothing is exported; set checkpoint.save_hf_interval")
    if ROLLOUT_ID not in checkpoint.save_hf:
        yield Problem(
            "checkpoint.save_hf",
            f"{checkpoint.save_hf!r} is one directory for all exports; put {ROLLOUT_ID} where its number belongs",
        )
