"""The verbs of the training loop, on a live gang, fleet and rollout manager."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator import publish_again
from orchestrator.config import Config
from orchestrator.manager_client import ManagerClient, PendingRollout
from orchestrator.publish import Publisher
from orchestrator.resume.continuity import Expected, confirm
from orchestrator.rollouts.engine_lanes import NoEngineServes
from orchestrator.rollouts.files import write_published
from orchestrator.running.gangs import Gangs
from orchestrator.running.interrupts import Stop
from orchestrator.running.run_dir import RunDir
from orchestrator.running.saving import Saving
from orchestrator.tracking.base import Tracker
from state.slots import WeightId


class LiveRun:
    """See `loops.Run`. Collects what is to be reported about a rollout between two calls of `report`.

    `trained`: how many rollouts it has trained on.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        gangs: Gangs,
        manager: ManagerClient,
        publisher: Publisher,
        steps: Tracker,
        evals: Tracker,
        stop: Stop,
        resumed: Mapping[str, Expected],
    ) -> None:
        """`resumed`: by role what its gang must be found to hold, where it continues from a checkpoint that says
        so."""
        self._config, self._run_dir = config, run_dir
        self._gangs, self._manager, self._publisher = gangs, manager, publisher
        self._steps, self._evals = steps, evals
        self._stop = stop
        self._resumed = resumed
        self._saving = Saving(config, run_dir, gangs)
        self._published: WeightId | None = None
        self._digest = ""
        self._publishes = 0
        self._metrics: dict[str, Any] = {}
        self._since = time.perf_counter()
        self.trained = 0

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
        self._metrics |= self._saving.check()
        self._stop.check()

    def train(self, rollout: PendingRollout) -> None:
        refs = rollout.wait()
        self._wake()
        began = time.perf_counter()
        self._metrics |= refs.stats
        self._metrics |= self._gangs.train(refs.shards)
        self._metrics["perf/train_s"] = time.perf_counter() - began
        self._run_dir.journal.append(
            "trained",
            incarnation=self._run_dir.incarnation,
            rollout_id=rollout.rollout_id,
            version=rollout.rollout_id + 1,
            behaviour=refs.behaviour,
        )
        self.trained += 1
        self._manager.mark_trained(rollout.rollout_id)

    def save(self, rollout_id: int) -> None:
        self._wake()
        self._metrics |= self._saving.save(rollout_id, self._manager.data_state())

    def finish_saves(self) -> None:
        self._metrics |= self._saving.finish()

    def export(self, rollout_id: int) -> None:
        self._wake()
        self._metrics |= self._saving.export(rollout_id)

    def publish(self) -> None:
        self._wake()
        done = publish_again.publish(self._publisher, self._manager, self._gangs.casualties, self._mint)
        self._published, self._digest = done.weights, done.digest
        if self._config.debug.save_rollouts is not None:
            write_published(Path(self._config.debug.save_rollouts), done.weights, done.digest)
        self._metrics |= {
            "weights/bytes": done.nbytes,
            "perf/publish_s": done.seconds,
            "perf/verify_s": done.verify_s,
        }

    def confirm_resume(self) -> None:
        held: dict[str, str] = {}
        jumps: list[str] = []
        for gang in self._gangs.all:
            if (resumed := self._resumed.get(gang.role)) is None:
                continue
            sworn = gang.agree(f"resume-{gang.role}-{self._run_dir.incarnation}", with_kept=True)
            jumps += confirm(resumed, sworn, gang.probe)
            held |= {gang.role: sworn.digest} | {f"{one.slot}@{one.version}": one.digest for one in sworn.kept}
        if not held:
            return
        self._run_dir.journal.append(
            "continuity",
            incarnation=self._run_dir.incarnation,
            paths=[str(resumed.directory) for resumed in self._resumed.values()],
            same_dtype=all(resumed.digest is not None for resumed in self._resumed.values()),
            held=held,
            jumps=jumps,
        )

    def evaluate(self, rollout_id: int) -> None:
        assert self._published is not None
        self._rest()
        self._evals.log(rollout_id, self._manager.evaluate(rollout_id, self._published))

    def report(self, rollout_id: int) -> None:
        """Beside this rollout's own measurements, those of the publish that its engines served and of saves since."""
        self._log(rollout_id, rollout_id + 1)

    def _mint(self) -> str:
        self._publishes += 1
        return f"publish-{self._run_dir.incarnation}-{self._publishes}"

    def _log(self, rollout_id: int, version: int) -> None:
        now = time.perf_counter()
        metrics = self._metrics | {"weights/version": version, "perf/step_s": now - self._since}
        self._since, self._metrics = now, {}
        self._steps.log(rollout_id, metrics)

    def _rest(self) -> None:
        """Engines are about to compute: where that is asked for, trainers free what they do not need meanwhile."""
        if self._config.cluster.offload_train and not self._gangs.asleep():
            self._gangs.sleep()

    def _wake(self) -> None:
        if self._config.cluster.offload_train and self._gangs.asleep():
            began = time.perf_counter()
            self._gangs.wake()
            self._metrics["perf/wake_s"] = time.perf_counter() - began
