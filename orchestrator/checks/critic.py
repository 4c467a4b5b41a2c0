"""Which options about a critic cannot be right together. Pure: looks at values alone."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config import Config
from orchestrator.options.problems import Problem
from orchestrator.resume import resuming
from workers.config import AlgorithmConfig, CriticConfig

_OF_PPO = ("gamma", "gae_lambda", "normalize_advantages")


def check(config: Config) -> Iterator[Problem]:
    """A critic is there for `ppo` alone; beside the actor it has directories of its own."""
    if not config.algorithm.needs_critic:
        yield from _unused(config)
        return
    yield from _directories(config)


def _unused(config: Config) -> Iterator[Problem]:
    estimator = config.algorithm.advantage_estimator
    without = f"algorithm.advantage_estimator {estimator} has no critic; set that to ppo, or leave this out"
    nothing, usual = CriticConfig(), AlgorithmConfig()
    for name, value in config.critic:
        if value != getattr(nothing, name):
            yield Problem(f"critic.{name}", without)
    for name in _OF_PPO:
        if getattr(config.algorithm, name) != getattr(usual, name):
            yield Problem(f"algorithm.{name}", without)


def _directories(config: Config) -> Iterator[Problem]:
    critic = config.critic
    for option, value in (("load", critic.load), ("save", critic.save)):
        if value == "":
            yield Problem(f"critic.{option}", "is empty; give a directory or leave it out")
    if critic.ckpt_step is not None and critic.load is None:
        yield Problem("critic.ckpt_step", "is an iteration of critic.load, which is not set")
    if critic.save is not None and config.checkpoint.save_interval is None:
        yield Problem("critic.save", "is set, but nothing is saved; set checkpoint.save_interval")
    saved, begins = resuming.critic_save_root(config), resuming.load_root(config)
    if saved is None or saved != begins or begins == resuming.save_root(config):
        return
    if critic.save is None:
        yield Problem("checkpoint.load", f"{saved} is where this run saves its critic; name the checkpoint of an actor")
        return
    yield Problem(
        "critic.save",
        f"{saved} is checkpoint.load too: the critic would write over what the actor began with. Leave it out (the "
        f"critic is saved to {resuming.save_root(config)}-critic then), or name another directory",
    )
