"""Training on rollouts that were saved: what the rollout manager is to a run that has engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.batching import data_parallel_size, num_rollouts, steps_per_rollout
from orchestrator.config import Config
from orchestrator.data.context import vocab_size
from orchestrator.dispatch import behaviour_versions, shards, trainable
from orchestrator.resume.data_state import StoredRollout, foreign_token
from orchestrator.rollouts.buffer import Rollout, RolloutBuffer, rollout_from_json
from orchestrator.rollouts.desk import RolloutRefs
from orchestrator.rollouts.files import PUBLISHED, digest_of, path_of
from state.errors import ResumeError
from state.stored import Malformed, check, parse_object
from workers.batch import TrainShard


class NoSavedRollout(ResumeError):
    """A rollout that is to be trained on is not there, or not whole."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rollout out of a file, as if it had been generated."""

    rollout_id: int
    refs: RolloutRefs
    generated_by: str | None
    """Digest of the weights that generated it; None where they were several, or are not known."""

    def wait(self) -> RolloutRefs:
        return self.refs


class SavedRollouts:
    """The rollouts in `debug.load_rollouts`."""

    def __init__(
        self, config: Config, start: int, data_state: Mapping[str, Any] | None, put: Callable[[TrainShard], Any]
    ) -> None:
        """Raises `NoSavedRollout` when one from `start` to `loop.num_rollout` is not there."""
        assert config.debug.load_rollouts is not None
        self._config, self._put = config, put
        self._directory = Path(config.debug.load_rollouts)
        self._buffer = RolloutBuffer({}) if data_state is None else RolloutBuffer.from_state(data_state)
        needed = range(start, num_rollouts(config))
        missing = [number for number in needed if not path_of(self._directory, number).is_file()]
        if missing:
            raise NoSavedRollout(
                f"debug.load_rollouts {self._directory} has no {path_of(self._directory, missing[0]).name}; rollouts "
                f"{start} to {needed[-1]} are to be trained on (loop.num_rollout)"
            )

    def read(self, rollout_id: int) -> Replayed:
        path = path_of(self._directory, rollout_id)
        try:
            content = parse_object(path.read_bytes())
            if wrong := check(StoredRollout, content):
                raise Malformed(wrong)
            if wrong := foreign_token(content["samples"], vocab_size(self._config.model)):
                raise Malformed(wrong)
        except (OSError, Malformed) as error:
            raise NoSavedRollout(f"{path} is no saved rollout: {error}") from error
        rollout = rollout_from_json(content)
        self._buffer.add(rollout)
        parts = shards(rollout_id, rollout.samples, steps_per_rollout(self._config), data_parallel_size(self._config))
        stats = {**rollout.stats, "rollout/trained_samples": len(trainable(rollout.samples))}
        put = tuple(self._put(part) for part in parts)
        refs = RolloutRefs(rollout_id, put, stats, behaviour_versions(rollout.samples))
        return Replayed(rollout_id, refs, self._generated_by(rollout))

    def mark_trained(self, rollout_id: int) -> None:
        self._buffer.mark_trained(rollout_id)

    def data_state(self) -> dict[str, Any]:
        """JSON for a checkpoint: the cursor behind the last rollout that was trained on."""
        return self._buffer.state()

    def _generated_by(self, rollout: Rollout) -> str | None:
        versions = {version for sample in rollout.samples for version in sample.versions}
        try:
            return digest_of(self._directory, versions.pop()) if len(versions) == 1 else None
        except Malformed as error:
            raise NoSavedRollout(f"{self._directory / PUBLISHED} {error}") from error
