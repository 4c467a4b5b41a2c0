"""What every rollout engine can do, whatever runs inside it.

An engine tells the truth about itself: it generates only with the weights it was asked for, and it swears to what it
holds by digests computed in its own process. Whether those are the right ones is decided outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from state.digest_records import TensorDigest
from state.errors import SlotwiseError
from state.slots import WeightId
from workers.batch import FinishReason
from workers.config import SamplingConfig
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan


class EngineRefused(SlotwiseError):
    """The engine will not do this now; its weights and requests are as they were. The message says why."""


class EngineDied(SlotwiseError):
    """What the engine computes with is no more, though its actor still answers. The message says what was seen."""


class WeightsMismatch(SlotwiseError):
    """Names, shapes, dtypes or digests of an update are not those of the engine's model."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response wanted. Equal seeds on equal prompts give equal samples, whatever they are batched with.

    `max_response_len` is a limit of its own, below that of the sampling; None: that one.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    max_response_len: int | None = None

    def room(self, sampling: SamplingConfig) -> int:
        """Tokens that its response may have."""
        return sampling.max_response_len if self.max_response_len is None else self.max_response_len


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One response.

    `response_ids` include the token (or tokens of the string) that ended it. `logprobs` are float32, one for each
    response token, of the policy at the sampling temperature before any top-p or top-k cut (at temperature 0: of the
    policy itself). `versions` are the weights that generated the tokens, in order; `handovers` how many tokens there
    were when each of them took over from the one before: none when there was only one.
    """

    request_id: str
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[WeightId, ...]
    handovers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ends = (0, *self.handovers, len(self.response_ids))
        if len(self.handovers) != max(len(self.versions) - 1, 0) or sorted(ends) != list(ends):
            raise ValueError(
                f"response {self.request_id}: {len(self.response_ids)} tokens by {len(self.versions)} versions cannot "
                f"have changed hands at {list(self.handovers)}"
            )

    @property
    def writers(self) -> tuple[WeightId, ...]:
        """Who generated it, token by token."""
        ends = (*self.handovers, len(self.response_ids))
        counts = (end - start for start, end in zip((0, *self.handovers), ends, strict=True))
        return tuple(weights for weights, n in zip(self.versions, counts, strict=True) for _ in range(n))


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine's own word about itself; reading it waits for nothing.

    `weights` are those of the last committed publish, or None: nothing was ever committed, an update is under way
    (`updating` is its publish id), or one came to nothing (`torn` says why).
    """

    engine_id: str
    weights: WeightId | None
    updating: str | None
    torn: str | None
    paused: bool
    in_flight: int
    pid: int


@dataclass(frozen=True, slots=True)
class Proof:
    """What an engine holds, hashed inside its process: every tensor by its Hugging Face name, sorted by name."""

    engine_id: str
    publish_id: str | None
    tensors: tuple[TensorDigest, ...]


def mismatches(expected: Sequence[TensorDigest], held: Sequence[TensorDigest]) -> tuple[str, ...]:
    """In words, every tensor in which two sets differ; empty only when they are equal. Pure."""
    wanted, found = {t.name: t for t in expected}, {t.name: t for t in held}
    words: list[str] = []
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            words.append(f"{name}: missing in the engine")
        elif name not in wanted:
            words.append(f"{name}: in the engine only")
        elif (found[name].dtype, found[name].shape) != (wanted[name].dtype, wanted[name].shape):
            words.append(
                f"{name}: {found[name].dtype} {list(found[name].shape)} in the engine, "
                f"{wanted[name].dtype} {list(wanted[name].shape)} published"
            )
        elif found[name].value != wanted[name].value:
            words.append(f"{name}: digest {found[name].value:016x} in the engine, {wanted[name].value:016x} published")
    return tuple(words)


class RolloutEngine(Protocol):
    """The verbs of an engine. An update goes: pause, flush, begin_update, receive, prove, then commit or abort,
    and after a commit resume."""

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        """One result per request, in their order. `EngineRefused` unless it serves exactly `expected`."""
        ...

    def pause(self) -> None:
        """Refuses new requests until `resume`. What is in flight ends within a token (`finish_reason` abort), or, of an
        engine that is told to keep it, waits for the next weights to go on."""
        ...

    def resume(self) -> None:
        """`EngineRefused` unless weights are committed."""
        ...

    def flush(self) -> None:
        """Drops everything computed with the current weights. `EngineRefused` while requests are generated."""
        ...

    def begin_update(self, manifest: Manifest) -> None:
        """From here the engine holds no weights to speak of. `EngineRefused` unless paused and idle,
        `WeightsMismatch` naming the tensors when the manifest is not of this model."""
        ...

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        """Takes part in the transfer and fills its parameters; returns the bytes received."""
        ...

    def prove(self) -> Proof:
        """Hashes what it holds."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Declares the manifest's weights. `EngineRefused` unless all of them arrived and the last proof equals it."""
        ...

    def abort(self, reason: str) -> None:
        """Gives up all claim to any weights, until the next update."""
        ...

    def view(self) -> EngineView: ...
