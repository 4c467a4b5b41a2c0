"""What an engine may claim about its weights, and when it may do what: the same for every kind of engine.

An engine has weights to its name only between a commit and the next update. To be committed, everything has to have
arrived, been hashed afterwards, and been found equal to the manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from state.digest_records import TensorDigest
from state.slots import Slot, WeightId
from workers.rollout.protocol import EngineRefused, EngineView, GenerateRequest, WeightsMismatch, mismatches
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.send_plan import SendPlan


class EngineClaim:
    """`model`: name -> (dtype, shape) of every tensor that the engine holds. All methods may be called from any thread.

    `abort` is set while what is in flight has to end, unless whoever generates `keeps` it: it then waits while the
    engine is paused, and goes on with the next weights.
    """

    def __init__(
        self, engine_id: str, model: Mapping[str, tuple[str, tuple[int, ...]]], *, keeps: bool = False
    ) -> None:
        self._engine_id, self._model, self._keeps = engine_id, dict(model), keeps
        self._lock = threading.Lock()
        self.abort = threading.Event()
        self._paused = False
        self._receiving = False
        self._in_flight = 0
        self._weights: WeightId | None = None
        self._updating: Manifest | None = None
        self._torn: str | None = None
        self._arrived: set[str] = set()
        self._proof: tuple[TensorDigest, ...] | None = None

    @contextmanager
    def generating(self, requests: Sequence[GenerateRequest], expected: WeightId) -> Iterator[None]:
        """Around the work on `requests`. `EngineRefused` unless the engine serves exactly `expected`."""
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"request {request.request_id} has an empty prompt")
        with self._lock:
            self._refuse_unless_serving(expected)
            self._in_flight += len(requests)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= len(requests)

    def pause(self) -> None:
        with self._lock:
            self._paused = True
            self.abort.set()

    def resume(self) -> None:
        with self._lock:
            if self._weights is None:
                raise EngineRefused(f"{self._engine_id} cannot resume: {self._why_no_weights()}")
            self._paused = False
            self.abort.clear()

    def refuse_flush_in_flight(self) -> None:
        """Whoever asks again finds what was aborted ended, and so a transfer that broke for its sender."""
        with self._lock:
            if self._receiving:
                raise EngineRefused(f"{self._engine_id} cannot flush: a transfer is under way")
            if self._in_flight and not self._keeps:
                raise EngineRefused(f"{self._engine_id} cannot flush: {self._in_flight} requests are in flight")

    def begin_update(self, manifest: Manifest) -> None:
        with self._lock:
            if not self._paused or (self._in_flight and not self._keeps) or self._receiving:
                raise EngineRefused(
                    f"{self._engine_id} cannot be updated: paused is {self._paused}, {self._in_flight} requests are "
                    f"in flight, {'a' if self._receiving else 'no'} transfer is under way"
                )
            if manifest.slot is not Slot.ACTOR:
                raise EngineRefused(f"{self._engine_id} takes the actor's weights, not those of {manifest.slot}")
            self._check_model([(t.name, t.dtype, t.shape) for t in manifest.tensors])
            self._weights, self._torn, self._proof = None, None, None
            self._arrived = set()
            self._updating = manifest

    @contextmanager
    def receiving(self, plan: SendPlan) -> Iterator[None]:
        """Around a transfer. What was proven before it is proven no more."""
        with self._lock:
            if self._updating is None or self._receiving:
                raise EngineRefused(f"{self._engine_id} cannot receive: no update has begun, or it is receiving")
            self._check_model([(t.name, t.dtype, t.shape) for t in plan.tensors])
            self._arrived, self._proof = set(), None
            self._receiving = True
        try:
            yield
        finally:
            with self._lock:
                self._receiving = False

    def arrives(self, tensor: TensorSpec) -> None:
        """Within `receiving`: the tensor is about to be stored."""
        if tensor.name in self._arrived:
            raise WeightsMismatch(f"{self._engine_id}: {tensor.name} arrived twice")
        self._arrived.add(tensor.name)

    def to_prove(self) -> Manifest | None:
        """The update that a proof that starts now is of. `EngineRefused` during a transfer."""
        with self._lock:
            if self._receiving:
                raise EngineRefused(f"{self._engine_id} cannot prove what is still arriving")
            return self._updating

    def proven(self, update: Manifest | None, tensors: tuple[TensorDigest, ...]) -> None:
        """What the engine held since `to_prove` returned `update`; void when things moved meanwhile."""
        with self._lock:
            if update is not None and update is self._updating and not self._receiving:
                self._proof = tensors

    def commit(self, manifest: Manifest) -> None:
        with self._lock:
            if self._updating != manifest:
                under_way = self._updating.publish_id if self._updating else None
                raise EngineRefused(
                    f"{self._engine_id} cannot commit publish {manifest.publish_id}: under way is {under_way}"
                )
            if missing := sorted(self._model.keys() - self._arrived):
                raise EngineRefused(f"{self._engine_id} cannot commit: {missing} never arrived")
            if self._proof is None:
                raise EngineRefused(f"{self._engine_id} cannot commit what it has not proven since it arrived")
            if wrong := mismatches(manifest.tensors, self._proof):
                raise EngineRefused(f"{self._engine_id} does not hold what was published: {'; '.join(wrong)}")
            self._weights, self._updating = manifest.weights, None

    def give_up(self, reason: str) -> None:
        with self._lock:
            self._weights, self._updating, self._proof = None, None, None
            self._torn = reason
            self._paused = True
            self.abort.set()

    def view(self, pid: int) -> EngineView:
        with self._lock:
            return EngineView(
                engine_id=self._engine_id,
                weights=self._weights,
                updating=self._updating.publish_id if self._updating else None,
                torn=self._torn,
                paused=self._paused,
                in_flight=self._in_flight,
                pid=pid,
            )

    def _refuse_unless_serving(self, expected: WeightId) -> None:
        if self._weights is None:
            raise EngineRefused(f"{self._engine_id} does not serve {expected}: {self._why_no_weights()}")
        if self._weights != expected:
            raise EngineRefused(f"{self._engine_id} serves weights {self._weights}, not {expected}")
        if self._paused:
            raise EngineRefused(f"{self._engine_id} is paused")

    def _why_no_weights(self) -> str:
        if self._updating is not None:
            return f"publish {self._updating.publish_id} is under way"
        if self._torn is not None:
            return f"its last update came to nothing ({self._torn})"
        return "nothing was ever published to it"

    def _check_model(self, described: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        theirs: dict[str, tuple[str, tuple[int, ...]]] = {}
        words: list[str] = []
        for name, dtype, shape in described:
            if name in theirs:
                words.append(f"{name} comes twice")
            theirs[name] = (dtype, shape)
        ours = self._model
        words += [f"{name} is missing" for name in sorted(ours.keys() - theirs.keys())]
        words += [f"{name} is not in this model" for name in sorted(theirs.keys() - ours.keys())]
        words += [
            f"{name} is {theirs[name][0]} {list(theirs[name][1])}, here {ours[name][0]} {list(ours[name][1])}"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ]
        if words:
            raise WeightsMismatch(f"{self._engine_id}: the update is not of this model: {'; '.join(words)}")
