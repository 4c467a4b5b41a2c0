"""The training worker as a Ray actor.

The driver imports this file, and neither Megatron nor a model: those are loaded where the rank lives.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import ray

from state.continuity import Probe
from state.gang import Attestation, Quorum
from state.slots import SlotView
from workers import state_log
from workers.batch import TrainShard
from workers.megatron.spec import WorkerSpec
from workers.metrics import MetricSink
from workers.weights.rendezvous import Endpoint
from workers.weights.send_plan import SendPlan

if TYPE_CHECKING:
    from workers.megatron.estimates import Targets, Values
    from workers.megatron.experience import Experience
    from workers.megatron.saving import Written
    from workers.megatron.worker import MegatronRank


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"inspect": 1, "disk": 1, "life": 1})
class MegatronWorker:
    """See `MegatronRank`. `view` answers on a thread of its own, and so does what is said about a save that is being
    written in the background; everything else in order on another.

    It never restarts by itself: a new process would hold none of the slots.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """What goes wrong in here is raised by the first verb: of a constructor's error Ray keeps no more than text."""
        self._worker = spec.worker
        state_log.to_stderr()
        self._made: MegatronRank | Exception
        try:
            self._made = _make(spec)
        except Exception as error:
            self._made = error

    def __repr__(self) -> str:
        """Ray reads this once, after `__init__`: identity, never state."""
        return f"MegatronWorker({self._worker})"

    @property
    def _rank(self) -> MegatronRank:
        if isinstance(self._made, Exception):
            raise self._made
        return self._made

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Ends with the process, and so tells whoever waits for it."""
        threading.Event().wait()

    def open_meeting(self) -> Endpoint:
        return self._rank.open_meeting()

    def init(self, meeting: Endpoint) -> SlotView:
        return self._rank.init(meeting)

    def attest(self, with_kept: bool) -> Attestation:
        return self._rank.attest(with_kept=with_kept)

    def train(self, shard: TrainShard, given: Experience | Targets | None = None) -> Mapping[str, float] | None:
        return self._rank.train(shard, given)

    def values(self, shard: TrainShard) -> tuple[None, Values]:
        """The first says that the second is there, which the driver hands on without looking at it; so below."""
        return None, self._rank.values(shard)

    def experience(self, shard: TrainShard, values: Values) -> tuple[None, Experience, Targets | None]:
        return None, *self._rank.experience(shard, values)

    def begin_publish(self, quorum: Quorum) -> None:
        self._rank.begin_publish(quorum)

    def open_endpoint(self, plan: SendPlan, engines: tuple[str, ...]) -> Endpoint:
        return self._rank.open_endpoint(plan, engines)

    def send(self, plan: SendPlan) -> int:
        return self._rank.send(plan)

    def end_publish(self, failure: str | None) -> None:
        self._rank.end_publish(failure)

    def save(self, quorum: Quorum, path: str, background: bool) -> None:
        self._rank.save(quorum, path, background=background)

    @ray.method(concurrency_group="disk")
    def written(self, publish_id: str) -> Written:
        return self._rank.written(publish_id)

    @ray.method(concurrency_group="disk")
    def end_save(self, publish_id: str, everyone: Sequence[Written]) -> None:
        self._rank.end_save(publish_id, everyone)

    def export(self, quorum: Quorum, path: str) -> None:
        self._rank.export(quorum, path)

    def sleep(self) -> None:
        self._rank.sleep()

    def wake(self) -> None:
        self._rank.wake()

    def probe(self) -> Probe | None:
        return self._rank.probe()

    @ray.method(concurrency_group="inspect")
    def view(self) -> SlotView:
        return self._rank.view()


def _make(spec: WorkerSpec) -> MegatronRank:
    from workers.megatron.lean_import import compiles, lean_import

    with lean_import(compiler=compiles()):
        from workers.megatron.worker import MegatronRank

    rank = MegatronRank(spec, spec.host or ray.util.get_node_ip_address())
    rank.journal.listen(state_log.log_state)
    rank.journal.listen(MetricSink(spec.worker.run).journaled)
    return rank
