"""What a rollout was like, in numbers. A key is there only when it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from orchestrator.rewards.scoring import Judged
from orchestrator.rollouts.group_work import Group
from orchestrator.rollouts.staleness import oldest
from workers.batch import Sample


def group_stats(groups: Sequence[Group]) -> dict[str, Any]:
    """`rollout_stats` of the samples in `groups`, and what it took to get them."""
    samples = [sample for group in groups for sample in group.samples]
    stats = rollout_stats(samples, [one for group in groups for one in group.judged])
    failed = [error for group in groups for error in group.failed]
    if failed:
        stats["rollout/first_error"] = failed[0].strip().splitlines()[-1]
    stats["rollout/generate_errors"] = len(failed)
    stats["rollout/asked_again"] = sum(group.asked_again for group in groups)
    return stats


def staleness_stats(samples: Sequence[Sample], rollout_id: int) -> dict[str, Any]:
    """How many versions the oldest token of each sample is behind the version that is trained in `rollout_id`."""
    behind = [rollout_id - version for one in samples if (version := oldest([one])) is not None]
    if not behind:
        return {}
    return {"rollout/staleness_mean": statistics.fmean(behind), "rollout/staleness_max": max(behind)}


def rollout_stats(samples: Sequence[Sample], judged: Sequence[Judged]) -> dict[str, Any]:
    """`reward/*` over the samples that have a reward, `rollout/*` over all samples. All are numbers, except for
    `reward/first_error`, which says in words what went wrong first."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    stats: dict[str, Any] = {
        "rollout/samples": len(samples),
        "rollout/aborted": sum(sample.finish_reason == "abort" for sample in samples),
        "reward/errors": sum(one.error is not None for one in judged),
        "reward/timeouts": sum(one.timed_out for one in judged),
    }
    errors = [one.error for one in judged if one.error is not None]
    if errors:
        stats["reward/first_error"] = errors[0].strip().splitlines()[-1]
    if samples:
        stats["reward/none_ratio"] = 1 - len(rewards) / len(samples)
        stats["rollout/response_len_mean"] = statistics.fmean(len(sample.response_ids) for sample in samples)
        stats["rollout/response_len_max"] = max(len(sample.response_ids) for sample in samples)
        stats["rollout/truncated_ratio"] = statistics.fmean(sample.finish_reason == "length" for sample in samples)
    if rewards:
        stats["reward/mean"] = statistics.fmean(rewards)
        stats["reward/std"] = statistics.pstdev(rewards)
    return stats
