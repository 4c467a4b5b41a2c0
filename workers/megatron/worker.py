"""The training worker: what one rank of the gang does. `actor.py` makes a Ray actor of it.

It wires a Megatron model, its optimizer and a slot machine, and does what the driver asks, one call at a time. What
may happen to the weights is the machine's to say: every use of them here is inside one of its scopes.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.distributed import Store

from state.ambient import TorchAmbient
from state.continuity import Probe
from state.gang import ActorPermit, Attestation, Quorum
from state.journal import Journal
from state.machine import SlotMachine
from state.resume import LoadSpec
from state.slots import Provenance, Slot, SlotView, Tier
from state.store import SlotStore
from workers.batch import TrainShard
from workers.device import Device
from workers.megatron import checkpoint, hf_io, probe, random_init
from workers.megatron.cpu import redirect
from workers.megatron.critic import Critic
from workers.megatron.estimates import Targets, Values
from workers.megatron.experience import Experience
from workers.megatron.hf_layout import VALUE_HEAD, GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.optimizer import build_optimizer
from workers.megatron.parallel import Layout, initialise
from workers.megatron.policy import Policy
from workers.megatron.saving import Saver, Written
from workers.megatron.spec import SlotSpec, WorkerSpec
from workers.weights import transports
from workers.weights.process_group import connect, listen
from workers.weights.rendezvous import Endpoint
from workers.weights.send_plan import SendPlan


class EndedByDriver(Exception):
    """The driver gave up the publish that this rank was part of; the text is its reason."""


class MegatronRank:
    """One rank. Its methods are called one at a time, on one thread, except `view`, `written` and `end_save`."""

    def __init__(self, spec: WorkerSpec, host: str) -> None:
        """`host`: an address of this node that the other ranks and the engines reach."""
        self._spec, self._host = spec, host
        self._device: Device = "cuda" if spec.train.gpus_per_worker else "cpu"
        self._journal = Journal(
            Path(spec.run_dir) / "journal" / f"{spec.worker.role}-{spec.worker.rank}.jsonl",
            f"{spec.worker.role}/{spec.worker.rank}",
        )
        self._machine: SlotMachine | None = None
        self._publish = ExitStack()
        self._permit: ActorPermit | None = None
        self._store: Store | None = None
        if spec.train.setup_hook is not None:
            pkgutil.resolve_name(spec.train.setup_hook)(self)

    # ---- init ------------------------------------------------------------------------------------------------

    def open_meeting(self) -> Endpoint:
        """For rank 0: open the store at which the gang meets. It listens before anyone hears of it."""
        self._store, port = listen(self._host, self._spec.train.timeout_s)
        return Endpoint(self._spec.worker.rank, self._host, port, "gang")

    def init(self, meeting: Endpoint) -> SlotView:
        """Join the gang, build model and optimizer, fill every slot; ends with the primary resident and verified."""
        spec = self._spec
        if self._store is None:
            self._store = connect(meeting, spec.train.timeout_s, str(spec.worker))
        with redirect(self._device):
            layout = Layout(
                spec.gang.world_size, spec.train.tensor_model_parallel_size, spec.train.pipeline_model_parallel_size
            )
            self._place = initialise(
                spec.worker.rank, layout, self._store, spec.seed, self._device, spec.train.timeout_s
            )
            hf_config = load_hf_config(spec.model)
            is_critic = spec.slots[0].slot is Slot.CRITIC
            gpt = build(hf_config, layout, spec.model, spec.train.megatron, seed=None, value_head=is_critic)
            self._model, self._optimizer = build_optimizer(gpt, spec.train, spec.total_steps)
            self._weights = GptWeights(gpt)
            self._sender = transports.sender(
                spec.weights.transport,
                spec.worker.rank,
                host=self._host,
                device=self._device,
                timeout_s=spec.weights.timeout_s,
                directory=spec.weights.directory,
            )
            tiers = {s.slot: s.tier for s in spec.slots}
            kept = [Slot.REF] if spec.ref_update_interval is not None else []
            if spec.keep_old_actors:
                tiers[Slot.OLD_ACTOR] = Tier.COPY
                kept.append(Slot.OLD_ACTOR)
            self._machine = SlotMachine(
                SlotStore(self._weights, tiers),
                worker=spec.worker,
                gang=spec.gang,
                journal=self._journal,
                ambient=TorchAmbient(self._model),
                primary=spec.slots[0].slot,
                optimizer=self._optimizer,
                keep_old_actors=spec.keep_old_actors,
                kept=kept,
            )
            self._learner: Policy | Critic
            if is_critic:
                self._learner = Critic(spec, self._model, self._optimizer, self._place)
            else:
                self._learner = Policy(spec, self._model, self._optimizer, self._machine, self._place)
            self._saver = Saver(spec, self._model, self._weights, self._optimizer, self._machine, self._journal)
            for slot in spec.slots:
                provenance = _provenance(slot.load, spec.seed)
                self._machine.load(slot.slot, partial(self._fill, slot), provenance, version=slot.version)
            self.finish_init()
        return self._machine.view()

    def finish_init(self) -> None:
        """The last act of init."""
        self._slots.ready()

    @property
    def _slots(self) -> SlotMachine:
        if self._machine is None:
            raise RuntimeError(f"{self._spec.worker} was asked to work before its init has ended")
        return self._machine

    def _fill(self, slot: SlotSpec) -> None:
        """Write the live tensors; for the primary the optimizer too. Everything it needs to know is in `slot`."""
        load, primary = slot.load, slot is self._spec.slots[0]
        std = self._weights.hf_config.initializer_range
        match load.kind:
            case "random":
                random_init.fill(self._weights, self._spec.seed, std)
            case "huggingface":
                assert load.path is not None
                hf_io.load_huggingface(self._weights, load.path)
            case "native" | "release":
                path = checkpoint.directory(load)
                if primary and self._spec.load_optimizer:
                    checkpoint.load_state(path, self._model, self._optimizer, load_rng=self._spec.load_rng)
                    return
                checkpoint.load_weights(path, self._model, but_head=slot.fresh_head)
        if slot.fresh_head:
            random_init.fill(self._weights, self._spec.seed, std, VALUE_HEAD)
        if primary:
            self._optimizer.reload_masters()

    # ---- training --------------------------------------------------------------------------------------------

    def values(self, shard: TrainShard) -> Values:
        """Of a critic: the values of a rollout's samples, on the last pipeline stage; None on the others."""
        with redirect(self._device):
            return self._critic.values(shard)

    def experience(self, shard: TrainShard, values: Values) -> tuple[Experience, Targets | None]:
        """Of an actor, with the values that the same rank of its critic found: what to train it on, and what the critic
        is to learn (on the last pipeline stage; None on the others)."""
        with redirect(self._device):
            return self._policy.experience(shard, values)

    def train(self, shard: TrainShard, given: Experience | Targets | None = None) -> Mapping[str, float] | None:
        """Train on one rollout. Returns the gang's metrics on one rank, None on the others.

        `given`: what `experience` made for this rank, where a critic takes part; for a critic what it is to learn.
        """
        with redirect(self._device):
            learn = self._learning(shard, given)
            with self._slots.step(shard.rollout_id) as scope:
                metrics = learn(scope.before_write)
            interval = self._spec.ref_update_interval
            if interval is not None and (shard.rollout_id + 1) % interval == 0:
                self._slots.snapshot(Slot.REF)
        place = self._place
        return metrics if place.is_last_stage and place.tp == 0 and place.dp == 0 else None

    def _learning(
        self, shard: TrainShard, given: Experience | Targets | None
    ) -> Callable[[Callable[[], None]], Mapping[str, float]]:
        """The optimizer steps of a rollout; whatever comes before them is done."""
        if isinstance(self._learner, Critic):
            assert not isinstance(given, Experience)
            return partial(self._learner.learn, shard, given)
        assert not isinstance(given, Targets)
        return partial(self._learner.learn, shard, given or self._learner.experience(shard, None)[0])

    @property
    def _policy(self) -> Policy:
        if not isinstance(self._learner, Policy):
            raise RuntimeError(f"{self._spec.worker} is a critic; it was asked for what an actor does")
        return self._learner

    @property
    def _critic(self) -> Critic:
        if not isinstance(self._learner, Critic):
            raise RuntimeError(f"{self._spec.worker} is no critic; it was asked for what a critic does")
        return self._learner

    # ---- letting bytes out -----------------------------------------------------------------------------------

    def attest(self, *, with_kept: bool = False) -> Attestation:
        return self._slots.attest(with_kept=with_kept)

    def begin_publish(self, quorum: Quorum) -> None:
        """Enter `publishing` and stay there until `end_publish`."""
        self._permit = self._publish.enter_context(self._slots.publishing(quorum))

    def open_endpoint(self, plan: SendPlan, engines: tuple[str, ...]) -> Endpoint:
        """Where the engines find this rank, which leads a stream of the plan."""
        endpoint = self._sender.listen(plan, engines)
        if endpoint is None:
            raise RuntimeError(f"{self._spec.worker} leads no stream of this plan; its leaders are {plan.leaders}")
        return endpoint

    def send(self, plan: SendPlan) -> int:
        """This rank's part of the plan; returns the bytes it broadcast."""
        if self._permit is None:
            raise RuntimeError(f"{self._spec.worker} was asked to send outside of a publish")
        with redirect(self._device):
            return self._sender.send(self._permit, plan, self._weights)

    def end_publish(self, failure: str | None) -> None:
        """Leave `publishing`, also where this rank had not entered it. What was published is kept as old_actor, where
        the algorithm needs it: it is what generates from now on."""
        scope, self._publish, self._permit = self._publish, ExitStack(), None
        try:
            with scope:
                if failure is not None:
                    raise EndedByDriver(failure)
        except EndedByDriver:
            return
        if self._spec.keep_old_actors:
            self._slots.snapshot(Slot.OLD_ACTOR)

    def save(self, quorum: Quorum, path: str, *, background: bool = False) -> None:
        """Write this rank's part of a checkpoint to `path`; see `Saver`."""
        with redirect(self._device):
            self._saver.save(quorum, Path(path), background=background)

    def written(self, publish_id: str) -> Written:
        """Wait for what a save in the background writes. From any thread."""
        return self._saver.written(publish_id)

    def end_save(self, publish_id: str, everyone: Sequence[Written]) -> None:
        """Every rank has written its part of a save in the background. From any thread."""
        self._saver.end(publish_id, everyone)

    def export(self, quorum: Quorum, path: str) -> None:
        """Write this rank's part of a Hugging Face directory to `path`."""
        with redirect(self._device):
            self._saver.export(quorum, Path(path))

    # ---- resting ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the live weights and the gradients while somebody else computes."""
        self._slots.sleep()
        self._optimizer.release_gradients()

    def wake(self) -> None:
        """Bring the primary back, verified."""
        self._optimizer.reclaim_gradients()
        self._slots.wake()

    # ---- looking ---------------------------------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        return self._journal

    def probe(self) -> Probe | None:
        """What the gang computes on the fixed batch, on one rank; None on the others."""
        spec = self._spec
        with redirect(self._device):
            taken = probe.take(
                self._model,
                self._optimizer,
                self._slots,
                has_ref=any(slot.slot is Slot.REF for slot in spec.slots),
                dtype=spec.model.dtype,
            )
        return taken if self._place.tp == 0 and self._place.dp == 0 else None

    def view(self) -> SlotView:
        """What is live here. From any thread, whatever the rank is doing."""
        if self._machine is not None:
            return self._machine.view()
        gang = self._spec.gang
        return SlotView(self._spec.worker, gang.world_size, gang.incarnation, "cold", 0, "created", time.time())


def _provenance(load: LoadSpec, seed: int) -> Provenance:
    match load.kind:
        case "random":
            return Provenance.random(seed)
        case "huggingface":
            return Provenance.huggingface(str(load.path))
        case _:
            return Provenance.checkpoint(str(load.path), load.iteration)
