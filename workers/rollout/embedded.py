"""A rollout engine inside this process: a transformers model, its generation loop and its KV cache.

It starts with random tensors that are no slot's weights, and generates nothing until a publish was committed.
"""

from __future__ import annotations

import os
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

from state.digest import digest_tensors, dtype_name
from state.slots import WeightId
from workers.config import ModelConfig, SamplingConfig
from workers.rollout.claim import EngineClaim
from workers.rollout.protocol import EngineView, GenerateRequest, GenerateResult, Proof
from workers.rollout.sampling import BatchSampling, Outcome, seed_tensor
from workers.rollout.transformers_layout import named_tensors
from workers.weights.base import Receiver
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan
from workers.weights.views import torch_dtype

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
            self._tensors = named_tensors(self._model)
            _fill_with_garbage(self._tensors)
        self._claim = EngineClaim(
            engine_id, {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in self._tensors.items()}
        )

    def __repr__(self) -> str:
        return f"EmbeddedEngine({self._engine_id})"

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        decode = self._decoder(sampling)
        with self._claim.generating(requests, expected):
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

    def pause(self) -> None:
        self._claim.pause()

    def resume(self) -> None:
        self._claim.resume()

    def flush(self) -> None:
        """The KV cache lives and ends with each call of `generate`, so that being idle is being flushed."""
        self._claim.refuse_flush_in_flight()

    def begin_update(self, manifest: Manifest) -> None:
        self._claim.begin_update(manifest)

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        with self._claim.receiving(plan), self._computing():
            return self._receiver.receive(plan, rendezvous, self._store)

    def prove(self) -> Proof:
        update = self._claim.to_prove()
        with self._computing():
            tensors = digest_tensors(self._tensors)
        self._claim.proven(update, tensors)
        return Proof(self._engine_id, update.publish_id if update else None, tensors)

    def commit(self, manifest: Manifest) -> None:
        self._claim.commit(manifest)

    def abort(self, reason: str) -> None:
        self._claim.give_up(reason)

    def view(self) -> EngineView:
        return self._claim.view(os.getpid())

    def close(self) -> None:
        """Leaves the groups of its transport."""
        self._receiver.close()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Threads and gradient mode belong to the calling thread, which may be another one at each call."""
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            yield

    def _store(self, spec: TensorSpec, tensor: Tensor) -> None:
        self._claim.arrives(spec)
        self._tensors[spec.name].copy_(tensor)

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
        if self._claim.abort.is_set():
            return [Outcome((), (), "abort")] * len(requests)
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self._generation.pad_token_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        rooms = [request.room(sampling) for request in requests]
        batch = BatchSampling.of(
            sampling,
            seed_tensor([request.seed for request in requests], self._device),
            torch.tensor(rooms, device=self._device),
            width,
            stop_ids=self._generation.stop_ids,
            decode=decode,
            aborted=self._claim.abort.is_set,
        )
        output = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=GenerationConfig(
                max_new_tokens=max(rooms),
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


def _fill_with_garbage(tensors: Mapping[str, Tensor]) -> None:
    """So that a tensor that never arrives can be mistaken for no slot's, not even where a slot holds ones or zeros."""
    generator = torch.Generator().manual_seed(_GARBAGE_SEED)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
