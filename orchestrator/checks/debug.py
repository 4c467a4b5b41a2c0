"""Which debugging options do not go with what else is asked for. Pure: looks at values alone."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config import Config
from orchestrator.options.problems import Problem


def check(config: Config) -> Iterator[Problem]:
    """Half a run does half of what a run does."""
    debug, checkpoint = config.debug, config.checkpoint
    if debug.load_rollouts is not None:
        without = "there are no engines with debug.load_rollouts; leave this out"
        if debug.rollout_only:
            yield Problem("debug.rollout_only", without)
        if debug.save_rollouts is not None:
            yield Problem("debug.save_rollouts", without)
        if config.eval.interval is not None:
            yield Problem("eval.interval", without)
        if config.algorithm.old_logprobs == "old_actor":
            yield Problem(
                "algorithm.old_logprobs",
                "old_actor is a copy of what was published, and with debug.load_rollouts nothing is; use engine",
            )
    if debug.rollout_only:
        for key, given in (
            ("checkpoint.save_interval", checkpoint.save_interval),
            ("checkpoint.save_hf_interval", checkpoint.save_hf_interval),
        ):
            if given is not None:
                yield Problem(key, "nothing is trained with debug.rollout_only, so there is nothing new to save")
