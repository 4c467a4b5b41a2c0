"""What a checkpoint holds of groups that were begun and not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.rewards.scoring import Judged
from orchestrator.rollouts import staleness
from orchestrator.rollouts.buffer import sample_from_json, sample_to_json
from orchestrator.rollouts.group_work import Group
from workers.batch import Prompt, Sample


@dataclass(frozen=True, slots=True)
class Begun:
    """A prompt that was begun: what the state of the data source was before it was read."""

    at: Mapping[str, Any]

    @property
    def group_id(self) -> int:
        return int(self.at["next_group_id"])


@dataclass(frozen=True, slots=True)
class Finished:
    """A group, judged. `begun` is None where it came from a checkpoint that does not say, and cannot begin again."""

    begun: Begun | None
    group: Group

    @property
    def oldest(self) -> int | None:
        """The oldest version that wrote a token of it."""
        return staleness.oldest(self.group.samples)

    def age(self) -> tuple[int, int]:
        """Sorts the oldest first, and of one version in the order of the data."""
        oldest = self.oldest
        return (-1 if oldest is None else oldest, self.group.prompt.group_id)


@dataclass(frozen=True, slots=True)
class StreamState:
    """`cursor`: how far the data was read; None: not at all."""

    cursor: Mapping[str, Any] | None = None
    finished: tuple[Finished, ...] = ()
    unfinished: tuple[Begun, ...] = ()

    @staticmethod
    def of(state: Mapping[str, Any] | None) -> StreamState:
        """From a checkpoint of this loop, or of one that makes whole rollouts, which then wait group by group."""
        if state is None:
            return StreamState()
        groups = [_from_json(entry) for entry in state.get("groups", ())]
        made = state["cursor"]
        for rollout in state["waiting"]:
            made = rollout["cursor_after"]
            samples = [sample_from_json(entry) for entry in rollout["samples"]]
            for group_id in dict.fromkeys(sample.group_id for sample in samples):
                groups.append(Finished(None, _as_group([s for s in samples if s.group_id == group_id])))
        return StreamState(made, tuple(groups), tuple(map(Begun, state.get("unfinished", ()))))

    def to_json(self) -> dict[str, Any]:
        assert self.cursor is not None
        return {
            "cursor": dict(self.cursor),
            "waiting": [],
            "groups": [_to_json(one) for one in self.finished],
            "unfinished": [dict(one.at) for one in self.unfinished],
        }


def _to_json(one: Finished) -> dict[str, Any]:
    group = one.group
    return {
        "at": None if one.begun is None else dict(one.begun.at),
        "samples": [sample_to_json(sample) for sample in group.samples],
        "judged": [asdict(judged) for judged in group.judged],
        "failed": list(group.failed),
        "asked_again": group.asked_again,
    }


def _from_json(entry: Mapping[str, Any]) -> Finished:
    samples = [sample_from_json(sample) for sample in entry["samples"]]
    judged = [Judged(**one) for one in entry["judged"]]
    begun = None if entry["at"] is None else Begun(entry["at"])
    return Finished(begun, _as_group(samples, judged, entry["failed"], entry["asked_again"]))


def _as_group(
    samples: Sequence[Sample],
    judged: Sequence[Judged] | None = None,
    failed: Sequence[str] = (),
    asked_again: int = 0,
) -> Group:
    prompt = Prompt(samples[0].group_id, samples[0].prompt_ids, "")
    judged = [Judged(sample.reward) for sample in samples] if judged is None else judged
    return Group(prompt, tuple(samples), tuple(judged), tuple(failed), asked_again, False, 0.0)
