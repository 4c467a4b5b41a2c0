"""All that crosses between rollout and training: prompts, samples, and the shards of a rollout that ranks train on.

Plain frozen values; no tensors, so that they pickle small and can be saved with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from state.slots import WeightId

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data source, tokenised once. `group_id` is unique in a run: samples are grouped by it."""

    group_id: int
    ids: tuple[int, ...]
    text: str
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`weights` wrote the response tokens from `start` up to, not including, `end`."""

    weights: WeightId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What followed a prompt. One entry per token: `loss_mask` is 1 where an engine wrote it, with its log-prob, and 0
    elsewhere (tool output), with a log-prob of 0."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt.

    `response_ids`, `logprobs`, `loss_mask` have one entry per generated token. `logprobs` are the engine's, of the
    policy at the sampling temperature before any top-p or top-k cut, and are kept as float32 values end to end.
    `versions` are the behaviour versions in the order they generated tokens: one, unless an update came in between.
    `spans` say which response tokens each of them wrote, in order; tokens that no engine wrote are in none.
    """

    group_id: int
    index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    versions: tuple[WeightId, ...]
    seed: int
    finish_reason: FinishReason
    reward: float | None = None
    spans: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.response_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"sample {self.group_id}/{self.index}: {len(self.response_ids)} tokens, {len(self.logprobs)} "
                f"log-probs, {len(self.loss_mask)} mask entries"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class StepShard:
    """What one data-parallel rank contributes to one optimizer step.

    The totals are over the *whole* step (all ranks): losses are sums divided by them, so that the gradient
    does not depend on how the step is split over micro-batches and ranks. `total_sequences` counts samples with at
    least one loss token.
    """

    samples: tuple[Sample, ...]
    total_tokens: int
    total_sequences: int


@dataclass(frozen=True, slots=True)
class TrainShard:
    """What one data-parallel rank trains on in one rollout: one entry per optimizer step. A group of samples may be
    spread over ranks."""

    rollout_id: int
    steps: tuple[StepShard, ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for step in self.steps for sample in step.samples)
