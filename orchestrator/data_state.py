"""What `data.json` of a checkpoint holds: the trained cursor, and rollouts that wait to be trained on."""

from __future__ import annotations

import os
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
    """See `workers.batch.Sample`; `versions` as pairs."""

    group_id: Count
    index: Count
    prompt_ids: _Ids
    response_ids: _Ids
    logprobs: list[float]
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]]
    versions: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    seed: int
    finish_reason: FinishReason
    reward: FiniteFloat | None

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> StoredSample:
        if not len(self.response_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError("response_ids, logprobs and loss_mask are not equally long")
        return self


class StoredRollout(Stored):
    """See `rollout_buffer.Rollout`."""

    rollout_id: Count
    samples: list[StoredSample]
    cursor_after: StoredCursor
    stats: dict[str, Any]


class DataState(Stored):
    """See `rollout_buffer.RolloutBuffer.state`."""

    cursor: StoredCursor
    waiting: list[StoredRollout]


def read(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The data state of a checkpoint, as `RolloutBuffer.from_state` takes it. `ResumeError` when it is none."""
    state = checkpoints.read_data(directory)
    if wrong := check(DataState, state):
        raise ResumeError(
            f"{Path(directory) / checkpoints.DATA} {wrong}; name another iteration with checkpoint.ckpt_step, or start "
            "over at rollout 0 with its weights (checkpoint.weights_only)"
        )
    return state
