"""Which rollouts were made and which were trained on: what a checkpoint must say about data.

The cursor that is saved is the one after the last *trained* rollout. Rollouts made but not yet trained are saved beside
it, and served again after a restart, so that nothing is lost, made twice or trained twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from state.slots import WeightId
from workers.batch import Sample, VersionSpan


@dataclass(frozen=True, slots=True)
class Rollout:
    """Everything that was generated for one rollout step, judged. `cursor_after` is the data source's state then."""

    rollout_id: int
    samples: tuple[Sample, ...]
    cursor_after: Mapping[str, Any]
    stats: Mapping[str, Any] = field(default_factory=dict)


class RolloutBuffer:
    """Rollouts between generation and training."""

    def __init__(self, cursor: Mapping[str, Any]) -> None:
        """`cursor`: the data source's state with nothing trained."""
        self._trained_cursor: Mapping[str, Any] = dict(cursor)
        self._made_cursor: Mapping[str, Any] = self._trained_cursor
        self._waiting: dict[int, Rollout] = {}
        self._restored: deque[Rollout] = deque()

    @property
    def made_cursor(self) -> Mapping[str, Any]:
        """The data source's state after the last rollout that was made: where the next one begins."""
        return self._made_cursor

    def take(self, rollout_id: int) -> Rollout | None:
        """The rollout to train on as `rollout_id`, when it is there already: asked for before, or restored.

        Restored rollouts are taken in the order they were made, under the id asked for: a run whose start step was
        overridden still gets all of them.
        """
        if rollout_id not in self._waiting and self._restored:
            self._waiting[rollout_id] = replace(self._restored.popleft(), rollout_id=rollout_id)
        return self._waiting.get(rollout_id)

    def add(self, rollout: Rollout) -> None:
        self._waiting[rollout.rollout_id] = rollout
        self._made_cursor = rollout.cursor_after

    def mark_trained(self, rollout_id: int) -> None:
        """Training on it is done: its samples may be forgotten, and the saved cursor moves past them."""
        if rollout_id not in self._waiting:
            waiting = ", ".join(map(str, self._waiting)) or "none"
            raise ValueError(f"rollout {rollout_id} is not waiting to be trained; waiting: {waiting}")
        self._trained_cursor = dict(self._waiting.pop(rollout_id).cursor_after)

    def state(self) -> dict[str, Any]:
        """JSON: the trained cursor, and the waiting rollouts in the order they were made."""
        waiting = [*(self._waiting[key] for key in sorted(self._waiting)), *self._restored]
        return {"cursor": dict(self._trained_cursor), "waiting": [rollout_to_json(rollout) for rollout in waiting]}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RolloutBuffer:
        buffer = RolloutBuffer(state["cursor"])
        buffer._restored.extend(rollout_from_json(entry) for entry in state["waiting"])
        if buffer._restored:
            buffer._made_cursor = buffer._restored[-1].cursor_after
        return buffer


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "samples": [sample_to_json(sample) for sample in rollout.samples],
        "cursor_after": dict(rollout.cursor_after),
        "stats": dict(rollout.stats),
    }


def rollout_from_json(entry: Mapping[str, Any]) -> Rollout:
    samples = tuple(sample_from_json(sample) for sample in entry["samples"])
    return Rollout(entry["rollout_id"], samples, entry["cursor_after"], entry["stats"])


def sample_to_json(sample: Sample) -> dict[str, Any]:
    return {
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "logprobs": list(sample.logprobs),
        "loss_mask": list(sample.loss_mask),
        "versions": [[version.incarnation, version.version] for version in sample.versions],
        "spans": [[span.weights.incarnation, span.weights.version, span.start, span.end] for span in sample.spans],
        "seed": sample.seed,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
    }


def sample_from_json(entry: Mapping[str, Any]) -> Sample:
    return Sample(
        group_id=entry["group_id"],
        index=entry["index"],
        prompt_ids=tuple(entry["prompt_ids"]),
        response_ids=tuple(entry["response_ids"]),
        logprobs=tuple(entry["logprobs"]),
        loss_mask=tuple(entry["loss_mask"]),
        versions=tuple(WeightId(*version) for version in entry["versions"]),
        spans=tuple(VersionSpan(WeightId(i, version), start, end) for i, version, start, end in entry["spans"]),
        seed=entry["seed"],
        finish_reason=entry["finish_reason"],
        reward=entry["reward"],
    )
