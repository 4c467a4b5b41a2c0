"""What `data.json` of a checkpoint holds: the cursor, and rollouts or groups that wait to be trained on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, model_validator

from state import checkpoints
from state.errors import ResumeError
from state.stored import Count, Stored, check
from workers.batch import FinishReason

_Ids = list[Count]
_INSTEAD = (
    "name another iteration with checkpoint.ckpt_step, or start over at rollout 0 with its weights "
    "(checkpoint.weights_only)"
)


class StoredCursor(Stored):
    """See `data.source.Cursor`, and of what data it is."""

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
    logprobs: list[FiniteFloat]
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
        return self

    @model_validator(mode="after")
    def _spans_are_of_its_tokens_and_versions(self) -> StoredSample:
        if not all(start <= end <= len(self.response_ids) for _, _, start, end in self.spans):
            raise ValueError("spans are not of response_ids")
        if any(before[3] > after[2] for before, after in pairwise(self.spans)):
            raise ValueError("spans overlap")
        if not all([incarnation, version] in self.versions for incarnation, version, _, _ in self.spans):
            raise ValueError("spans are of weights that versions does not name")
        if any(self.loss_mask) and not self.versions:
            raise ValueError("versions do not say which weights wrote it")
        return self


class StoredRollout(Stored):
    """See `rollouts.buffer.Rollout`."""

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

    @model_validator(mode="after")
    def _one_group(self) -> StoredGroup:
        if {sample.group_id for sample in self.samples} != {self.samples[0].group_id}:
            raise ValueError("samples are of more than one group")
        if self.at is not None and self.at.next_group_id != self.samples[0].group_id:
            raise ValueError("at is where another group began")
        if len(self.judged) != len(self.samples):
            raise ValueError("judged does not have one entry per sample")
        return self


class DataState(Stored):
    """See `rollouts.buffer.RolloutBuffer.state`; with `groups` and `unfinished` prompts `stream_state.StreamState`."""

    cursor: StoredCursor
    waiting: list[StoredRollout]
    groups: list[StoredGroup] = Field(default_factory=list)
    unfinished: list[StoredCursor] = Field(default_factory=list)

    @model_validator(mode="after")
    def _nothing_waits_twice(self) -> DataState:
        rollouts, groups = [one.samples for one in self.waiting], [one.samples for one in self.groups]
        samples = [(sample.group_id, sample.index) for sample in chain(*rollouts, *groups)]
        begun = [*(one[0].group_id for one in groups), *(one.next_group_id for one in self.unfinished)]
        if _twice(samples) or _twice(begun) or _twice(one.rollout_id for one in self.waiting):
            raise ValueError("something waits twice to be trained on")
        return self

    @model_validator(mode="after")
    def _cursors_are_of_one_data(self) -> DataState:
        others = [one.cursor_after for one in self.waiting] + [one.at for one in self.groups if one.at is not None]
        if any(one.fingerprint != self.cursor.fingerprint for one in chain(others, self.unfinished)):
            raise ValueError("cursors are of more than one data")
        return self


def _twice(names: Iterable[object]) -> bool:
    found = list(names)
    return len(set(found)) < len(found)


def waiting_versions(state: Mapping[str, Any]) -> frozenset[int]:
    """Versions of the actor that generated what waits in a checkpoint to be trained on."""
    return frozenset(int(version) for sample in _samples(state) for _, version in sample["versions"])


def refuse_impossible(
    state: Mapping[str, Any], saved_version: int, vocab_size: int | None, directory: str | os.PathLike[str]
) -> None:
    """Raise `ResumeError` for samples that the actor of `saved_version`, or one before it, cannot have written: of a
    version after it, or with tokens that the model does not have (where `vocab_size` is known)."""
    later = (
        f"{_name(sample)} is of version {version} of the actor, which was saved at version {saved_version}"
        for sample in _samples(state)
        for _, version in sample["versions"]
        if version > saved_version
    )
    if wrong := next(later, None) or foreign_token(_samples(state), vocab_size):
        raise ResumeError(f"{Path(directory) / checkpoints.DATA}: {wrong}; {_INSTEAD}")


def foreign_token(samples: Iterable[Mapping[str, Any]], vocab_size: int | None) -> str | None:
    """In words, which of `samples` has a token that a model of `vocab_size` (None: not known) does not have."""
    for sample in samples:
        highest = max(chain(sample["prompt_ids"], sample["response_ids"]), default=0)
        if vocab_size is not None and highest >= vocab_size:
            return f"{_name(sample)} has token {highest}, and the model has {vocab_size}"
    return None


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
        raise ResumeError(f"{Path(directory) / checkpoints.DATA} {wrong}; {_INSTEAD}")
    return state


def _name(sample: Mapping[str, Any]) -> str:
    return f"sample {sample['group_id']}/{sample['index']}"


def _samples(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return chain.from_iterable(part["samples"] for part in (*state["waiting"], *state.get("groups", ())))
