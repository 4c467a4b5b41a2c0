"""The gang as the driver sees it: one call, all ranks, unanimously or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.placement import Placement
from orchestrator.waiting import WorkerFailed, gather, wait_for
from state.continuity import Probe
from state.gang import Attestation, Quorum, agree
from state.slots import SlotView
from workers.config import TrainConfig
from workers.megatron.actor import MegatronWorker
from workers.megatron.spec import WorkerSpec
from workers.weights.rendezvous import Endpoint
from workers.weights.send_plan import SendPlan

VIEW_TIMEOUT_S = 5.0
NAME_FREE_S = 30.0
"""How long an actor that was killed may keep its name."""
UNREACHABLE_S = 60.0
"""Longer than Ray takes to find that a node has died."""


def data_parallel_rank(rank: int, train: TrainConfig) -> int:
    """Ranks are numbered tensor parallel first, then data parallel, then pipeline."""
    tp, pp = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    return rank // tp % (train.num_workers // (tp * pp))


class TrainGroup:
    """All ranks of one training role. A failure on any rank is a failure of the call.

    What all ranks are handed is put into the object store once: a quorum of a large model has 100 KB, and Ray would
    pack it again for each of a thousand ranks.
    """

    def __init__(self, specs: Sequence[WorkerSpec], placement: Placement) -> None:
        self._train = specs[0].train
        self._workers = [_create(spec, placement) for spec in specs]
        self._lifelines = [worker.live.options(name="live").remote() for worker in self._workers]
        self._role = specs[0].worker.role
        borrowed = ", ".join(f"borrows {slot.slot}" for slot in specs[0].slots[1:])
        self._train_name = f"train[{', '.join(filter(None, (self._role, borrowed)))}]"

    @property
    def handles(self) -> Mapping[str, Any]:
        """Actor handles by name, for inspectors."""
        return {f"{self._role}/{rank}": worker for rank, worker in enumerate(self._workers)}

    @property
    def lifelines(self) -> Mapping[str, Any]:
        """By name, a call to each rank that ends with its process alone."""
        return {f"{self._role}/{rank}": line for rank, line in enumerate(self._lifelines)}

    @property
    def role(self) -> str:
        return self._role

    def begin_init(self) -> dict[str, Any]:
        """Fill every slot on every rank; the calls by name, which end with the primary live and verified."""
        timeout = self._train.timeout_s
        meeting = wait_for(self._workers[0].open_meeting.remote(), f"{self._role}/0", "start", timeout)
        return {name: worker.init.remote(meeting) for name, worker in self.handles.items()}

    def agree(self, publish_id: str, *, with_kept: bool = False) -> Quorum:
        """Every rank attests; raises GangDisagreement unless they are unanimous and clean.

        `with_kept`: also about the slots that a checkpoint holds beside the actor.
        """
        attestations: list[Attestation] = self._all("attest", lambda worker: worker.attest.remote(with_kept))
        return agree(attestations, publish_id)

    def begin_train(
        self, shards: Sequence[ray.ObjectRef], given: Sequence[ray.ObjectRef] | None = None
    ) -> dict[str, Any]:
        """One rollout; `shards` has one reference per data-parallel rank, `given` one per rank: what another gang made
        for it. The calls by name; one of them answers with the gang's metrics."""
        return {
            name: worker.train.options(name=self._train_name).remote(
                self._share(shards, rank), None if given is None else given[rank]
            )
            for rank, (name, worker) in enumerate(self.handles.items())
        }

    def values(self, shards: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """Of a critic: a reference for each rank to the values of its samples."""
        done = [
            worker.values.options(num_returns=2).remote(self._share(shards, rank))
            for rank, worker in enumerate(self._workers)
        ]
        self._wait_for_first("find values", done)
        return [values for _, values in done]

    def experience(
        self, shards: Sequence[ray.ObjectRef], values: Sequence[ray.ObjectRef]
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """Of an actor: a reference for each rank to what it trains on, and to what the same rank of the critic does,
        whose `values` these are."""
        done = [
            worker.experience.options(num_returns=3).remote(self._share(shards, rank), values[rank])
            for rank, worker in enumerate(self._workers)
        ]
        self._wait_for_first("find advantages", done)
        return [experience for _, experience, _ in done], [targets for _, _, targets in done]

    def _share(self, shards: Sequence[ray.ObjectRef], rank: int) -> ray.ObjectRef:
        return shards[data_parallel_rank(rank, self._train)]

    def _wait_for_first(self, what: str, calls: Sequence[Sequence[ray.ObjectRef]]) -> None:
        """Of what each rank returns, the first says that the rest is there; the driver fetches no more than that."""
        gather({name: calls[rank][0] for rank, name in enumerate(self.handles)}, what, self._train.timeout_s)

    def probe(self) -> Probe:
        """What the gang computes on the fixed batch."""
        probes: list[Probe | None] = self._all("compute the probe", lambda worker: worker.probe.remote())
        return next(probe for probe in probes if probe is not None)

    def save(self, quorum: Quorum, path: str, *, background: bool) -> None:
        """Every rank writes its part of the agreed weights, the optimizer and random state under `path`.

        In the background, every rank has a copy of its part when this returns, and begins to write that.
        """
        name, shared = _named("save", quorum), ray.put(quorum)
        self._all("save", lambda worker: worker.save.options(name=name).remote(shared, path, background))

    def finish_save(self, publish_id: str) -> None:
        """Returns once every rank has written its part of a save in the background, and the whole is indexed. From any
        thread; the gang's other calls go on meanwhile."""
        written = self._all("write to disk", lambda worker: worker.written.remote(publish_id))
        self._all("end a save", lambda worker: worker.end_save.remote(publish_id, written))

    def export(self, quorum: Quorum, path: str) -> None:
        """Every rank writes its part of the agreed weights as a Hugging Face directory `path`."""
        shared = ray.put(quorum)
        self._all("export", lambda worker: worker.export.remote(shared, path))

    def begin_publish(self, quorum: Quorum) -> None:
        """Every rank enters `publishing` and acknowledges; no engine has been touched before this returns."""
        name, shared = _named("publish", quorum), ray.put(quorum)
        self._all("begin publishing", lambda worker: worker.begin_publish.options(name=name).remote(shared))

    def open_endpoints(self, plan: SendPlan, engines: tuple[str, ...]) -> tuple[Endpoint, ...]:
        """The leaders of `plan` open the stores at which `engines` will meet them."""
        shared = ray.put(plan)
        leaders = {
            f"{self._role}/{rank}": self._workers[rank].open_endpoint.remote(shared, engines) for rank in plan.leaders
        }
        return tuple(gather(leaders, "open an endpoint", self._train.timeout_s).values())

    def send(self, plan: SendPlan) -> dict[str, Any]:
        """Start sending on every rank; returns the pending calls by name."""
        shared = ray.put(plan)
        return {name: worker.send.remote(shared) for name, worker in self.handles.items()}

    def end_publish(self, failure: str | None) -> None:
        """Every rank leaves `publishing`; with a `failure` it first proves that its bytes are as they were."""
        self._all("end publishing", lambda worker: worker.end_publish.remote(failure))

    def sleep(self) -> None:
        """Every rank releases its live weights and gradients."""
        self._all("sleep", lambda worker: worker.sleep.remote())

    def wake(self) -> None:
        """Every rank brings its primary back, verified."""
        self._all("wake", lambda worker: worker.wake.remote())

    def views(self) -> tuple[SlotView, ...]:
        """What is live on every rank; answered while they work."""
        views = gather({n: w.view.remote() for n, w in self.handles.items()}, "show its slots", VIEW_TIMEOUT_S)
        return tuple(views.values())

    def asleep(self) -> bool:
        return any(view.state == "asleep" for view in self.views())

    def casualties(self) -> Mapping[str, str]:
        """By name, the ranks that are dead, poisoned or silent, and why.

        Where a rank cannot be reached, Ray finds out within a while whether its node has died; until it knows, it would
        put another rank there.
        """
        deadline = time.monotonic() + UNREACHABLE_S
        while True:
            asked = {name: worker.view.remote() for name, worker in self.handles.items()}
            answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=VIEW_TIMEOUT_S)
            looked = {name: _condition(call if call in answered else None) for name, call in asked.items()}
            if not any(one.unreachable for one in looked.values()) or time.monotonic() >= deadline:
                return {name: one.trouble for name, one in looked.items() if one.trouble is not None}
            time.sleep(0.5)

    def kill(self) -> None:
        """End every rank at once. Those that are dead already lose their names."""
        for worker in self._workers:
            ray.kill(worker)

    def _all(self, what: str, call: Callable[[Any], Any]) -> list[Any]:
        calls = {name: call(worker) for name, worker in self.handles.items()}
        return list(gather(calls, what, self._train.timeout_s).values())


@dataclass(frozen=True, slots=True)
class _Condition:
    """Of one rank. `trouble` is None where there is none."""

    trouble: str | None
    unreachable: bool = False


def _condition(answer: Any | None) -> _Condition:
    """From a rank's view, None where it has not come in time."""
    if answer is None:
        return _Condition(f"does not answer within {VIEW_TIMEOUT_S:g} s")
    try:
        view = ray.get(answer)
    except RayError as error:
        return _Condition(f"{type(error).__name__}: {error}", isinstance(error, ActorUnavailableError))
    return _Condition(f"poisoned {view.detail}" if view.state == "poisoned" else None)


def _named(what: str, quorum: Quorum) -> str:
    """How Ray's list of tasks shows that bytes leave the gang, and which."""
    return f"{what}[{quorum.slot}@{quorum.weights} {quorum.publish_id}]"


def _create(spec: WorkerSpec, placement: Placement) -> Any:
    """Once the rank of that name that was killed is forgotten."""
    bundle = placement.worker_bundle(spec.worker.role, spec.worker.rank)
    actor = MegatronWorker.options(  # type: ignore[attr-defined]
        name=str(spec.worker),
        namespace=spec.worker.run,
        num_cpus=spec.train.cpus_per_worker,
        num_gpus=spec.train.gpus_per_worker,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, bundle),
    )
    deadline = time.monotonic() + NAME_FREE_S
    while True:
        try:
            return actor.remote(spec)
        except ValueError as error:  # Ray's way to say that the name is taken
            if time.monotonic() >= deadline:
                raise WorkerFailed(f"{spec.worker} cannot be created within {NAME_FREE_S:g} s: {error}") from error
            time.sleep(0.05)
