"""What `data.json` of a checkpoint holds: the cursor, and rollouts or groups that wait to be trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, model_validator

from state import checkpoints
from state.errors import ResumeError
from state.stored import Count, Stored, check
from workers.batch import FinishReason

_Ids = list[Count]


class StoredCursor(Stored):
    """See `data.Cursor`, and of what data it is."""

    fingerprint: str
    position: Count
    epoch: Count
    next_group_id: Count
    left_out: Count


class StoredSample(Stored):
    """See `workers.batch.Sample`; `versions` as pairs, `spans` as those and where they begin and end."""

    group_id: Count
    index: Count
    prompt_ids: _Ids
    response_ids: _Ids
    logprobs: list[float]
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]]
    versions: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    spans: list[Annotated[list[Count], Field(min_length=4, max_length=4)]]
    seed: int
    finish_reason: FinishReason
    reward: FiniteFloat | None

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> StoredSample:
        if not len(self.response_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError("response_ids, logprobs and loss_mask are not equally long")
        if not all(start <= end <= len(self.response_ids) for _, _, start, end in self.spans):
            raise ValueError("spans are not of response_ids")
        return self


class StoredRollout(Stored):
    """See `rollout_buffer.Rollout`."""

    rollout_id: Count
    samples: list[StoredSample]
    cursor_after: StoredCursor
    stats: dict[str, Any]


class StoredVerdict(Stored):
    """See `rewards.scoring.Judged`."""

    reward: FiniteFloat | None
    timed_out: bool
    error: str | None


class StoredGroup(Stored):
    """See `stream_state.Finished`."""

    at: StoredCursor | None
    samples: Annotated[list[StoredSample], Field(min_length=1)]
    judged: list[StoredVerdict]
    failed: list[str]
    asked_again: Count


class DataState(Stored):
    """See `rollout_buffer.RolloutBuffer.state`; with `groups` and `unfinished` prompts `stream_state.StreamState`."""

    cursor: StoredCursor
    waiting: list[StoredRollout]
    groups: list[StoredGroup] = Field(default_factory=list)
    unfinished: list[StoredCursor] = Field(default_factory=list)


def waiting_versions(state: Mapping[str, Any]) -> frozenset[int]:
    """Versions of the actor that generated what waits in a checkpoint to be trained on."""
    parts = (*state["waiting"], *state.get("groups", ()))
    return frozenset(int(version) for part in parts for sample in part["samples"] for _, version in sample["versions"])


def refuse_groups(state: Mapping[str, Any], mode: str, directory: str | os.PathLike[str]) -> None:
    """Raise `ResumeError` for groups that wait, where the loop takes rollouts as a whole."""
    finished, unfinished = len(state.get("groups", ())), len(state.get("unfinished", ()))
    if mode != "fully_async" and finished + unfinished:
        raise ResumeError(
            f"{directory} was saved by a `fully_async` loop: {finished} groups wait to be trained on and {unfinished} "
            f"were under way, which a `{mode}` loop would lose. Continue with loop.mode fully_async, or from "
            "its weights alone with checkpoint.weights_only"
        )


def read(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The data state of a checkpoint, as `RolloutBuffer.from_state` takes it. `ResumeError` when it is none."""
    state = checkpoints.read_data(directory)
    if wrong := check(DataState, state):
        raise ResumeError(
            f"{Path(directory) / checkpoints.DATA} {wrong}; name another iteration with checkpoint.ckpt_step, or start "
            "over at rollout 0 with its weights (checkpoint.weights_only)"
        )
    return state
