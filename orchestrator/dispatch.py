"""Who trains on which samples: pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence

from workers.batch import Sample, StepShard, TrainShard


def trainable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that training may see: finished ones that have a reward."""
    return [sample for sample in samples if sample.reward is not None and sample.finish_reason != "abort"]


def behaviour_versions(samples: Sequence[Sample]) -> tuple[int, ...]:
    """The versions of the actor that generated what of these training may see."""
    return tuple(sorted({weights.version for sample in trainable(samples) for weights in sample.versions}))


def shards(rollout_id: int, samples: Sequence[Sample], num_steps: int, dp: int) -> list[TrainShard]:
    """One shard for each of `dp` data-parallel ranks; samples that are not `trainable` are left out.

    Samples are cut in their order into `num_steps` optimizer steps of nearly equal counts. Within a step they are
    balanced over ranks by tokens, so a group may be spread over ranks: whoever needs its rewards gathers them. A rank
    has no sample in a step only when the step has fewer samples than ranks.
    """
    if num_steps < 1 or dp < 1:
        raise ValueError(f"num_steps and dp must be at least 1, got {num_steps} and {dp}")
    kept = trainable(samples)
    steps = [kept[len(kept) * i // num_steps : len(kept) * (i + 1) // num_steps] for i in range(num_steps)]
    by_step = [_step_shards(step, dp) for step in steps]
    return [TrainShard(rollout_id, tuple(step[rank] for step in by_step)) for rank in range(dp)]


def _step_shards(samples: Sequence[Sample], dp: int) -> list[StepShard]:
    total_tokens = sum(sample.num_loss_tokens for sample in samples)
    total_sequences = sum(sample.num_loss_tokens > 0 for sample in samples)
    parts = balance([sample.num_tokens for sample in samples], dp)
    return [StepShard(tuple(samples[i] for i in own), total_tokens, total_sequences) for own in parts]


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` lists of nearly equal sums, each in ascending order.

    Longest processing time first (Graham 1969): at most 4/3 of the best possible maximum. Ties go to the part with
    fewer items, then to the lower one, so no part is empty while another has two.
    """
    own: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min(range(parts), key=lambda p: (loads[p], len(own[p]), p))
        own[part].append(index)
        loads[part] += costs[index]
    return [sorted(indices) for indices in own]
