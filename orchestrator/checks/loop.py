"""Which options of the loop cannot be right together. Pure: looks at values alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.config import Config
from orchestrator.options.problems import Problem
from orchestrator.rollouts import staleness


def _length(config: Config) -> Iterator[Problem]:
    loop, generator = config.loop, config.data.generator
    if loop.num_rollout is None and loop.num_epoch is None:
        yield Problem(
            "loop.num_rollout",
            "how long is the run? Give this, or loop.num_epoch for passes over data.path (0 rollouts: only evaluate)",
        )
    elif loop.num_rollout is not None and loop.num_epoch is not None:
        yield Problem(
            "loop.num_epoch",
            "give this or loop.num_rollout, not both (a flag takes back what the file says: --loop.num_rollout null)",
        )
    elif loop.num_epoch is not None and generator is not None:
        yield Problem(
            "loop.num_epoch",
            f"data.generator {generator} has no end, so there are no epochs of it; give loop.num_rollout",
        )


def _staleness(config: Config) -> Iterator[Problem]:
    """Training must never wait for what may not be begun."""
    loop, bound = config.loop, staleness.bound(config.loop)
    if loop.mode != "fully_async":
        if loop.max_staleness is not None:
            yield Problem(
                "loop.max_staleness",
                f"bounds what a fully_async loop trains on, and loop.mode is {loop.mode}; leave it out, or set that",
            )
        return
    behind = loop.update_weights_interval - 1
    if bound < behind:
        yield Problem(
            "loop.max_staleness",
            f"{bound} is less than loop.update_weights_interval {behind + 1} makes of it: engines are {behind} "
            f"versions behind before each publish, and training would wait for ever. Use at least {behind}, or publish "
            f"after every {_rollouts(bound + 1)}",
        )
    if loop.start_rollout_id is not None:
        yield Problem(
            "loop.start_rollout_id",
            "renumbers versions, by which a fully_async loop counts staleness; leave it out",
        )
    if config.debug.rollout_only:
        yield Problem(
            "debug.rollout_only", "trains nothing, so that there is no version to be stale to; use a `sync` loop"
        )


def _behaviour(config: Config) -> Iterator[Problem]:
    """`old_actor` needs one version for each sample, and all of those that may be trained on."""
    if config.loop.mode != "fully_async" or config.algorithm.old_logprobs != "old_actor":
        return
    bound = staleness.bound(config.loop)
    if config.old_actor.keep <= bound:
        yield Problem(
            "old_actor.keep",
            f"{config.old_actor.keep} published versions, but with loop.max_staleness {bound} samples of {bound + 1} "
            f"may wait to be trained on; use at least {bound + 1}, a smaller bound, or algorithm.old_logprobs engine",
        )
    if config.rollout.generate is not None:
        yield Problem(
            "algorithm.old_logprobs",
            "a sample of rollout.generate may be written by several versions, turn by turn, so that no one old_actor "
            "is its behaviour policy; use `engine`",
        )


def _rollouts(n: int) -> str:
    return "rollout" if n == 1 else f"{n} rollouts"


CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (_length, _staleness, _behaviour)
