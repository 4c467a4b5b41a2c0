"""How far what is trained on may be behind what is trained: the arithmetic of a `fully_async` loop. Pure.

Staleness of a sample is counted in versions: that of the actor when it is trained on the sample, less the oldest that
wrote a token of it. Rollout `t` is trained on by version `t`, and makes version `t + 1` of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.config import LoopConfig
from workers.batch import Sample

DEFAULT = 1


def bound(loop: LoopConfig) -> int:
    """`loop.max_staleness`, or its default."""
    return DEFAULT if loop.max_staleness is None else loop.max_staleness


def capacity(max_staleness: int, version: int, batch: int, accepted: int) -> int:
    """Groups that may still be begun while engines serve `version` (AReaL, arXiv 2505.24298: staleness-aware
    training).

    What is begun now is trained on, oldest first, after the `accepted` groups before it: in rollout
    `accepted // batch`, which may be `max_staleness` behind `version` and no more.
    """
    return (max_staleness + version + 1) * batch - accepted


def accepted(trained: int, batch: int, waiting: int, under_way: int) -> int:
    """Groups that were begun and not given up, since the run began: those of the `trained` rollouts, those that wait to
    be trained on and those being generated. Follows from the version that was trained, so that a run that continues
    accepts as many as one that was never stopped."""
    return trained * batch + waiting + under_way


def oldest(samples: Iterable[Sample]) -> int | None:
    """The oldest version that wrote a token of these; None where no version did."""
    return min((weights.version for sample in samples for weights in sample.versions), default=None)


def is_too_stale(version: int | None, rollout_id: int, max_staleness: int) -> bool:
    """Whether what `version` wrote must not be trained on in `rollout_id`, nor later."""
    return version is not None and rollout_id - version > max_staleness
