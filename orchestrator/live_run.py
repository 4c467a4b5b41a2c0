"""The verbs of the training loop, on a live gang, fleet and rollout manager."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from orchestrator import exporting, resuming
from orchestrator.config import Config
from orchestrator.continuity import Expected, confirm
from orchestrator.engine_lanes import NoEngineServes
from orchestrator.fingerprints import fingerprints
from orchestrator.interrupts import Stop
from orchestrator.manager_client import ManagerClient, PendingRollout
from orchestrator.publish import Publisher
from orchestrator.rollout_files import write_published
from orchestrator.run_dir import RunDir
from orchestrator.tracking.base import Tracker
from orchestrator.train_group import TrainGroup
from orchestrator.waiting import WorkerFailed
from state import checkpoints
from state.gang import Quorum
from state.slots import WeightId


class LiveRun:
    """See `loops.Run`. Collects what is to be reported about a rollout between two calls of `report`."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        gang: TrainGroup,
        manager: ManagerClient,
        publisher: Publisher,
        steps: Tracker,
        evals: Tracker,
        stop: Stop,
        resumed: Expected | None,
    ) -> None:
        """`resumed`: what the gang must be found to hold, where it continues from a checkpoint that says so."""
        self._config, self._run_dir = config, run_dir
        self._gang, self._manager, self._publisher = gang, manager, publisher
        self._steps, self._evals = steps, evals
        self._stop = stop
        self._resumed = resumed
        self._fingerprints = fingerprints(config) if config.checkpoint.save_interval is not None else {}
        self._published: WeightId | None = None
        self._digest = ""
        self._publishes = 0
        self._metrics: dict[str, Any] = {}
        self._since = time.perf_counter()
        self._asleep = False

    def generate(self, rollout_id: int) -> PendingRollout:
        assert self._published is not None
        self._rest()
        return self._manager.generate(rollout_id, self._published)

    def wait(self, rollout: PendingRollout) -> None:
        """When every engine was lost over it, those that took their places are published to at once, out of schedule,
        and generate it again. Ends, for replacements are bounded."""
        while True:
            try:
                with self._stop.interruptible():
                    rollout.wait()
                return
            except NoEngineServes:
                self.publish()
                assert self._published is not None
                rollout.again(self._published)

    def may_stop(self) -> None:
        self._stop.check()

    def train(self, rollout: PendingRollout) -> None:
        refs = rollout.wait()
        self._wake()
        began = time.perf_counter()
        self._metrics |= refs.stats
        self._metrics |= self._gang.train(refs.shards)
        self._metrics["perf/train_s"] = time.perf_counter() - began
        self._run_dir.journal.append(
            "trained",
            incarnation=self._run_dir.incarnation,
            rollout_id=rollout.rollout_id,
            version=rollout.rollout_id + 1,
        )
        self._manager.mark_trained(rollout.rollout_id)

    def save(self, rollout_id: int) -> None:
        self._wake()
        began = time.perf_counter()
        root = resuming.save_root(self._config)
        assert root is not None
        probe = self._gang.probe()
        quorum = self._gang.agree(f"save-{self._run_dir.incarnation}-{rollout_id}", with_kept=True)
        directory = checkpoints.begin(root, rollout_id)
        checkpoints.write_data(directory, self._manager.data_state())
        checkpoints.write_probe(directory, probe.to_json())
        self._gang.save(quorum, str(directory))
        marker = self._marker(quorum, rollout_id) | {
            "slots": _kept(quorum),
            "fingerprint": self._fingerprints,
            "layout": {
                "num_workers": self._config.train.num_workers,
                "tensor_model_parallel_size": self._config.train.tensor_model_parallel_size,
                "pipeline_model_parallel_size": self._config.train.pipeline_model_parallel_size,
            },
        }
        checkpoints.commit(root, rollout_id, marker, self._config.checkpoint.keep, resuming.protected(self._config))
        self._record_save(quorum, rollout_id, directory)
        self._metrics["perf/save_s"] = time.perf_counter() - began

    def export(self, rollout_id: int) -> None:
        self._wake()
        began = time.perf_counter()
        target = exporting.directory(self._config, rollout_id)
        quorum = self._gang.agree(f"export-{self._run_dir.incarnation}-{rollout_id}")
        partial = checkpoints.begin_export(target)
        self._gang.export(quorum, str(partial))
        checkpoints.commit_export(partial, target, self._marker(quorum, rollout_id))
        self._record_save(quorum, rollout_id, target)
        self._metrics["perf/export_s"] = time.perf_counter() - began

    def publish(self) -> None:
        """A publish that an engine died in is begun anew with the others: its group broke with it."""
        self._wake()
        while True:
            dead = self._manager.dead_engines()
            self._publishes += 1
            try:
                done = self._publisher.publish(f"publish-{self._run_dir.incarnation}-{self._publishes}")
                break
            except WorkerFailed:
                self._manager.reconcile()
                if self._manager.dead_engines() == dead:
                    raise
        self._published, self._digest = done.weights, done.digest
        if self._config.debug.save_rollouts is not None:
            write_published(Path(self._config.debug.save_rollouts), done.weights, done.digest)
        self._metrics |= {
            "weights/bytes": done.nbytes,
            "perf/publish_s": done.seconds,
            "perf/verify_s": done.verify_s,
        }

    def confirm_resume(self) -> None:
        if self._resumed is None:
            return
        held = self._gang.agree(f"resume-{self._run_dir.incarnation}", with_kept=True)
        found = confirm(self._resumed, held, self._gang.probe)
        self._run_dir.journal.append(
            "continuity",
            incarnation=self._run_dir.incarnation,
            path=str(self._resumed.directory),
            jumps=list(found),
        )
        self._resumed = None

    def evaluate(self, rollout_id: int) -> None:
        assert self._published is not None
        self._rest()
        self._evals.log(rollout_id, self._manager.evaluate(rollout_id, self._published))

    def report(self, rollout_id: int) -> None:
        """Beside this rollout's own measurements, those of the publish that its engines served and of saves since."""
        self._log(rollout_id, rollout_id + 1)

    def _log(self, rollout_id: int, version: int) -> None:
        now = time.perf_counter()
        metrics = self._metrics | {"weights/version": version, "perf/step_s": now - self._since}
        self._since, self._metrics = now, {}
        self._steps.log(rollout_id, metrics)

    def _marker(self, quorum: Quorum, rollout_id: int) -> dict[str, Any]:
        """What was written, in the words of those who swore to it."""
        return {
            "run": self._config.run.name,
            "iteration": rollout_id,
            "incarnation": quorum.weights.incarnation,
            "version": quorum.weights.version,
            "digest": quorum.digest,
            "tensors": {t.name: f"{t.value:016x}" for t in quorum.tensors},
        }

    def _record_save(self, quorum: Quorum, rollout_id: int, path: Path) -> None:
        self._run_dir.journal.append(
            "save",
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

    def _rest(self) -> None:
        """Engines are about to compute: where that is asked for, trainers free what they do not need meanwhile."""
        if self._config.cluster.offload_train and not self._asleep:
            self._gang.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            began = time.perf_counter()
            self._gang.wake()
            self._asleep = False
            self._metrics["perf/wake_s"] = time.perf_counter() - began


def _kept(quorum: Quorum) -> list[dict[str, Any]]:
    """What the checkpoint holds beside the actor, as JSON."""
    return [{"slot": k.slot, "version": k.version, "digest": k.digest, "summaries": k.summaries} for k in quorum.kept]
