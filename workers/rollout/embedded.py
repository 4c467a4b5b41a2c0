"""A rollout engine inside this process: a transformers model, its generation loop and its KV cache.

It starts with random tensors that are no slot's weights, and generates nothing until a publish was committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from state.digest import TensorDigest, digest_tensor, dtype_name
from state.slots import Slot, WeightId
from workers.config import ModelConfig, SamplingConfig
from workers.rollout.protocol import (
    EngineRefused,
    EngineView,
    GenerateRequest,
    GenerateResult,
    Proof,
    WeightsMismatch,
    mismatches,
)
from workers.rollout.sampling import BatchSampling, Outcome, seed_tensor
from workers.weights.base import Receiver
from workers.weights.buckets import TensorSpec, torch_dtype
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan

_GARBAGE_SEED = 0x5107


class EmbeddedEngine:
    """See `RolloutEngine`. Any verb may be called from any thread; `generate` and `receive` do the long work.

    `model` says architecture and dtype only, never weights. `tokenizer` (a directory) is needed for stop strings.
    """

    def __init__(
        self,
        engine_id: str,
        model: ModelConfig,
        receiver: Receiver,
        *,
        device: str = "cpu",
        max_batch_size: int = 256,
        num_threads: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        self._engine_id = engine_id
        self._receiver = receiver
        self._device = torch.device(device)
        self._max_batch_size = max_batch_size
        self._num_threads = num_threads
        self._tokenizer = None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
        with self._computing():
            self._model, self._generation = _build(model, self._device)
            self._tensors = _named_tensors(self._model)
            _fill_with_garbage(self._tensors)
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._paused = False
        self._receiving = False
        self._in_flight = 0
        self._weights: WeightId | None = None
        self._updating: Manifest | None = None
        self._torn: str | None = None
        self._arrived: set[str] = set()
        self._proof: tuple[TensorDigest, ...] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedEngine({self._engine_id})"

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        decode = self._decoder(sampling)
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"request {request.request_id} has an empty prompt")
        with self._lock:
            self._refuse_unless_serving(expected)
            self._in_flight += len(requests)
        try:
            outcomes: dict[int, Outcome] = {}
            by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
            for start in range(0, len(requests), self._max_batch_size):
                chosen = by_length[start : start + self._max_batch_size]
                with self._computing():
                    batch = self._generate_batch([requests[i] for i in chosen], sampling, decode)
                outcomes.update(zip(chosen, batch, strict=True))
            return tuple(
                GenerateResult(
                    request.request_id,
                    outcomes[i].response_ids,
                    outcomes[i].logprobs,
                    outcomes[i].finish_reason,
                    (expected,),
                )
                for i, request in enumerate(requests)
            )
        finally:
            with self._lock:
                self._in_flight -= len(requests)

    def pause(self) -> None:
        with self._lock:
            self._paused = True
            self._abort.set()

    def resume(self) -> None:
        with self._lock:
            if self._weights is None:
                raise EngineRefused(f"{self._engine_id} cannot resume: {self._why_no_weights()}")
            self._paused = False
            self._abort.clear()

    def flush(self) -> None:
        """The KV cache lives and ends with each call of `generate`, so that being idle is being flushed."""
        with self._lock:
            if self._in_flight:
                raise EngineRefused(f"{self._engine_id} cannot flush: {self._in_flight} requests are in flight")

    def begin_update(self, manifest: Manifest) -> None:
        with self._lock:
            if not self._paused or self._in_flight or self._receiving:
                raise EngineRefused(
                    f"{self._engine_id} cannot be updated: paused is {self._paused}, {self._in_flight} requests are "
                    f"in flight, {'a' if self._receiving else 'no'} transfer is under way"
                )
            if manifest.slot is not Slot.ACTOR:
                raise EngineRefused(f"{self._engine_id} takes the actor's weights, not those of {manifest.slot}")
            self._check_model((t.name, t.dtype, t.shape) for t in manifest.tensors)
            self._weights, self._torn, self._proof = None, None, None
            self._arrived = set()
            self._updating = manifest

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        with self._lock:
            if self._updating is None or self._receiving:
                raise EngineRefused(f"{self._engine_id} cannot receive: no update has begun, or it is receiving")
            self._check_model((t.name, t.dtype, t.shape) for t in plan.tensors)
            self._arrived, self._proof = set(), None
            self._receiving = True
        try:
            with self._computing():
                return self._receiver.receive(plan, rendezvous, self._store)
        finally:
            with self._lock:
                self._receiving = False

    def prove(self) -> Proof:
        with self._lock:
            if self._receiving:
                raise EngineRefused(f"{self._engine_id} cannot prove what is still arriving")
            updating = self._updating
        with self._computing():
            tensors = tuple(digest_tensor(name, self._tensors[name]) for name in sorted(self._tensors))
        with self._lock:
            if updating is not None and updating is self._updating and not self._receiving:
                self._proof = tensors
        return Proof(self._engine_id, updating.publish_id if updating else None, tensors)

    def commit(self, manifest: Manifest) -> None:
        with self._lock:
            if self._updating != manifest:
                under_way = self._updating.publish_id if self._updating else None
                raise EngineRefused(
                    f"{self._engine_id} cannot commit publish {manifest.publish_id}: under way is {under_way}"
                )
            if missing := sorted(self._tensors.keys() - self._arrived):
                raise EngineRefused(f"{self._engine_id} cannot commit: {missing} never arrived")
            if self._proof is None:
                raise EngineRefused(f"{self._engine_id} cannot commit what it has not proven since it arrived")
            if wrong := mismatches(manifest.tensors, self._proof):
                raise EngineRefused(f"{self._engine_id} does not hold what was published: {'; '.join(wrong)}")
            self._weights, self._updating = manifest.weights, None

    def abort(self, reason: str) -> None:
        with self._lock:
            self._weights, self._updating, self._proof = None, None, None
            self._torn = reason
            self._paused = True
            self._abort.set()

    def view(self) -> EngineView:
        with self._lock:
            return EngineView(
                engine_id=self._engine_id,
                weights=self._weights,
                updating=self._updating.publish_id if self._updating else None,
                torn=self._torn,
                paused=self._paused,
                in_flight=self._in_flight,
                pid=os.getpid(),
            )

    def close(self) -> None:
        """Leaves the groups of its transport."""
        self._receiver.close()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Threads and gradient mode belong to the calling thread, which may be another one at each call."""
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            yield

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

    def _check_model(self, described: Iterator[tuple[str, str, tuple[int, ...]]]) -> None:
        theirs: dict[str, tuple[str, tuple[int, ...]]] = {}
        words: list[str] = []
        for name, dtype, shape in described:
            if name in theirs:
                words.append(f"{name} comes twice")
            theirs[name] = (dtype, shape)
        ours = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in self._tensors.items()}
        words += [f"{name} is missing" for name in sorted(ours.keys() - theirs.keys())]
        words += [f"{name} is not in this model" for name in sorted(theirs.keys() - ours.keys())]
        words += [
            f"{name} is {theirs[name][0]} {list(theirs[name][1])}, here {ours[name][0]} {list(ours[name][1])}"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ]
        if words:
            raise WeightsMismatch(f"{self._engine_id}: the update is not of this model: {'; '.join(words)}")

    def _store(self, spec: TensorSpec, tensor: Tensor) -> None:
        if spec.name in self._arrived:
            raise WeightsMismatch(f"{self._engine_id}: {spec.name} arrived twice")
        self._tensors[spec.name].copy_(tensor)
        self._arrived.add(spec.name)

    def _decoder(self, sampling: SamplingConfig) -> Callable[[Sequence[int]], str] | None:
        if self._tokenizer is None:
            if sampling.stop:
                raise ValueError(f"{self._engine_id} has no tokenizer, which stop strings need: set model.tokenizer")
            return None
        tokenizer = self._tokenizer
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    def _generate_batch(
        self,
        requests: Sequence[GenerateRequest],
        sampling: SamplingConfig,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> list[Outcome]:
        if self._abort.is_set():
            return [Outcome((), (), "abort")] * len(requests)
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self._generation.pad_token_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        batch = BatchSampling.of(
            sampling,
            seed_tensor([request.seed for request in requests], self._device),
            width,
            stop_ids=self._generation.stop_ids,
            decode=decode,
            aborted=self._abort.is_set,
        )
        output = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_response_len,
                do_sample=False,
                use_cache=True,
                pad_token_id=self._generation.pad_token_id,
            ),
            logits_processor=batch.processors,
            stopping_criteria=batch.criteria,
        )
        return batch.ending.outcomes(output)


class _EndTokens:
    """The model's own end tokens, and one to pad with."""

    def __init__(self, config: PretrainedConfig, directory: str | None) -> None:
        generation = GenerationConfig.from_model_config(config)
        if directory is not None and (Path(directory) / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(directory)
        eos = generation.eos_token_id
        self.stop_ids: tuple[int, ...] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        pad = generation.pad_token_id
        self.pad_token_id: int = pad if pad is not None else next(iter(self.stop_ids), 0)


def _build(model: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, _EndTokens]:
    if model.config is not None:
        config = AutoConfig.for_model(**model.config)
    elif model.hf_checkpoint is not None:
        config = AutoConfig.from_pretrained(model.hf_checkpoint)
    else:
        raise ValueError("an engine needs model.config or model.hf_checkpoint")
    ends = _EndTokens(config, model.hf_checkpoint)
    built = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(model.dtype), attn_implementation="sdpa")
    built.generation_config = GenerationConfig()
    return built.to(device).eval().requires_grad_(False), ends


def _named_tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Parameters and persistent buffers by Hugging Face name; a tied tensor once, by the name of its first use."""
    parameters = dict(model.named_parameters(remove_duplicate=True))
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in every_name}
    return {**parameters, **buffers}


def _fill_with_garbage(tensors: Mapping[str, Tensor]) -> None:
    """So that a tensor that never arrives can be mistaken for no slot's, not even where a slot holds ones or zeros."""
    generator = torch.Generator().manual_seed(_GARBAGE_SEED)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
