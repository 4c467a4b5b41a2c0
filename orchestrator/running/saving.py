"""Checkpoints and exports of a run: agree, write, commit, journal. In the background where that is asked for.

at once            agree -> every rank writes -> marker, tracker, retention -> journal `save`
in the background  agree -> every rank copies -> journal `save_begun`; then, on a thread beside training:
                   every rank has written its copy -> marker, tracker, retention -> journal `save`

With a critic both gangs have written before either is committed, the critic first: the run continues from what the
actor's tracker names, and the critic has that, whenever it is killed. Retention comes after both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.resume import resuming
from orchestrator.resume.fingerprints import fingerprints
from orchestrator.running import exporting
from orchestrator.running.gangs import Gangs
from orchestrator.running.run_dir import RunDir
from orchestrator.train_group import TrainGroup
from orchestrator.waiting import WorkerFailed
from state import saves
from state.gang import Quorum
from state.slots import Slot


@dataclass(frozen=True, slots=True)
class _Part:
    """What one gang saves."""

    gang: TrainGroup
    root: Path
    directory: Path
    quorum: Quorum


class Saving:
    """What a run writes of its gangs. At most one save is in the background at a time."""

    def __init__(self, config: Config, run_dir: RunDir, gangs: Gangs) -> None:
        self._config, self._run_dir, self._gangs = config, run_dir, gangs
        self._fingerprints = fingerprints(config) if config.checkpoint.save_interval is not None else {}
        self._under_way: InBackground | None = None

    def save(self, rollout_id: int, data: Mapping[str, Any]) -> dict[str, float]:
        """Save every gang after `rollout_id`, and `data`, the trained cursor. Returns what was measured.

        In the background, it is to continue from only once `finish` has returned, or the next save.
        """
        measured = self.finish()
        began = time.perf_counter()
        background = self._config.checkpoint.async_save
        parts = [self._write(gang, rollout_id, data, background=background) for gang in self._gangs.all]
        if background:
            for part in parts:
                self._record("save_begun", part.quorum, rollout_id, part.directory)
            publish_id = parts[-1].quorum.publish_id
            self._under_way = InBackground(publish_id, lambda: self._commit(parts, rollout_id, background=True))
        else:
            self._commit(parts, rollout_id, background=False)
        return measured | {"perf/save_s": time.perf_counter() - began}

    def _write(self, gang: TrainGroup, rollout_id: int, data: Mapping[str, Any], *, background: bool) -> _Part:
        """Agree on what a gang holds, and have its ranks write it, or begin to."""
        of_actor = gang is self._gangs.actor
        root = resuming.save_root(self._config) if of_actor else resuming.critic_save_root(self._config)
        assert root is not None
        probe = gang.probe()
        name = "save" if of_actor else f"save-{gang.role}"
        quorum = gang.agree(f"{name}-{self._run_dir.incarnation}-{rollout_id}", with_kept=True)
        directory = saves.begin(root, rollout_id)
        if of_actor:
            saves.write_data(directory, data)
        saves.write_probe(directory, probe)
        gang.save(quorum, str(directory), background=background)
        return _Part(gang, root, directory, quorum)

    def _commit(self, parts: Sequence[_Part], rollout_id: int, *, background: bool) -> None:
        if background:
            for part in parts:
                part.gang.finish_save(part.quorum.publish_id)
        for part in parts:
            marker = self._full_marker(part.quorum, rollout_id) | _partner(part, parts)
            saves.commit(part.root, rollout_id, marker, keep=None)
            self._record("save", part.quorum, rollout_id, part.directory)
        keep, protect = self._config.checkpoint.keep, resuming.protected(self._config)
        for part in parts:
            saves.retain(part.root, keep, protect)

    def check(self) -> dict[str, float]:
        """What was measured of a save in the background that has ended. Raises what it failed of; never waits."""
        if self._under_way is None or not self._under_way.ended:
            return {}
        return self.finish()

    def finish(self) -> dict[str, float]:
        """Wait for the save in the background, if there is one, as long as a call to the gang may take. Raises what it
        failed of."""
        if self._under_way is None:
            return {}
        awaited, self._under_way = self._under_way, None
        awaited.wait(self._config.train.timeout_s)
        return {"perf/background_save_s": awaited.seconds}

    def export(self, rollout_id: int) -> dict[str, float]:
        """Write the actor after `rollout_id` as a Hugging Face directory. Returns what was measured."""
        began = time.perf_counter()
        target = exporting.directory(self._config, rollout_id)
        quorum = self._gangs.actor.agree(f"export-{self._run_dir.incarnation}-{rollout_id}")
        partial = saves.begin_export(target)
        self._gangs.actor.export(quorum, str(partial))
        saves.commit_export(partial, target, self._marker(quorum, rollout_id))
        self._record("save", quorum, rollout_id, target)
        return {"perf/export_s": time.perf_counter() - began}

    def _marker(self, quorum: Quorum, rollout_id: int) -> dict[str, Any]:
        """What was written, in the words of those who swore to it."""
        return {
            "run": self._config.run.name,
            "role": quorum.role,
            "iteration": rollout_id,
            "incarnation": quorum.weights.incarnation,
            "version": quorum.weights.version,
            "digest": quorum.digest,
            "tensors": {t.name: f"{t.value:016x}" for t in quorum.tensors},
        }

    def _full_marker(self, quorum: Quorum, rollout_id: int) -> dict[str, Any]:
        train = self._config.train
        return self._marker(quorum, rollout_id) | {
            "dtype": self._config.model.dtype,
            "slots": _kept(quorum),
            "fingerprint": self._fingerprints,
            "layout": {
                "num_workers": train.num_workers,
                "tensor_model_parallel_size": train.tensor_model_parallel_size,
                "pipeline_model_parallel_size": train.pipeline_model_parallel_size,
            },
        }

    def _record(self, kind: str, quorum: Quorum, rollout_id: int, path: Path) -> None:
        self._run_dir.journal.append(
            kind,
            role=quorum.role,
            publish_id=quorum.publish_id,
            iteration=rollout_id,
            incarnation=quorum.weights.incarnation,
            version=quorum.weights.version,
            digest=quorum.digest,
            transitions=quorum.transitions,
            summaries=quorum.summaries,
            slots=_kept(quorum),
            path=str(path),
        )


class InBackground:
    """`commit` on a thread. What it raises is raised again by `wait`."""

    def __init__(self, publish_id: str, commit: Callable[[], None]) -> None:
        self._publish_id, self._commit = publish_id, commit
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=publish_id, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if not self.ended:
            raise WorkerFailed(f"{self._publish_id}: not written within {timeout_s:g} s of being waited for")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._commit()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began


def _partner(part: _Part, parts: Sequence[_Part]) -> dict[str, Any]:
    """What names, in a marker, the other role that was saved with this one."""
    others = {other.quorum.role: other for other in parts if other is not part}
    if critic := others.get(Slot.CRITIC):
        return {"critic": critic.quorum.digest}
    if actor := others.get(Slot.ACTOR):
        return {"actor": str(actor.root)}
    return {}


def _kept(quorum: Quorum) -> list[dict[str, Any]]:
    """What the checkpoint holds beside the actor, as JSON."""
    return [{"slot": k.slot, "version": k.version, "digest": k.digest, "summaries": k.summaries} for k in quorum.kept]
