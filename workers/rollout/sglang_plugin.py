"""What Slotwise adds to an SGLang server, through the server's own plug-in entry points: nothing is patched on disk.

Hooks in every scheduler process:

- `WeightChecker.handle`: the action `slotwise.digest` hashes the tensors that the model holds, where they stand;
  `slotwise.load` with a bucket in shared memory hands its tensors to the model's own loader;
- `SamplingBatchInfo.from_schedule_batch`: each request's own seed counts, also where the server is not run in its
  deterministic mode (which few attention backends offer);
- `multinomial_with_seed`: drawing by seed on a CPU, where SGLang's own needs a kernel that is not in its wheel.

Runs in the server's Python, which may be another than ours: imports torch, SGLang and files that are copied along.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from state.digest import digest_pieces
from state.digest_records import PieceDigest
from workers.rollout.noise import gumbel_noise
from workers.rollout.sglang_layout import EXPERTS, Shape, pieces
from workers.weights.shared_memory import import_buffer

ACTION = "slotwise.digest"
LOAD = "slotwise.load"
ENTRY_POINTS = "[sglang.srt.plugins]\nslotwise = workers.rollout.sglang_plugin:register\n"


def register() -> None:
    """Called by the server in each of its processes, before it starts to serve."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _handle, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _seed, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", _draw, HookType.AROUND)


def _handle(original: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:
    """The answer has the fields that the server wants of a checksum: piece -> digest, and who computed them."""
    action, _, bucket = (args[0] if args else kwargs["action"]).partition(" ")
    if action not in (ACTION, LOAD):
        return original(checker, *args, **kwargs)
    who = checker._parallelism_info(**{key: kwargs[key] for key in ("role",) if key in kwargs})
    model = checker._get_model()
    with torch.no_grad():
        if action == LOAD:
            _load(model, json.loads(bucket))
            found = []
        else:
            found = pieces(held_by(model), shape_of(model, who.tp_rank, who.tp_size))
        digest = digest_pieces(found)
    return {
        "checksums": {write_piece(p): f"{p.value:016x}" for p in digest.pieces},
        "per_gpu_checksum": digest.summary,
        "parallelism_info": who.model_dump(),
    }


def load_action(buffer: str, tensors: Sequence[tuple[str, str, int, Sequence[int]]]) -> str:
    """Tensors (name, dtype, byte of the buffer, shape) in the shared memory that the handle `buffer` opens."""
    return f"{LOAD} {json.dumps({'buffer': buffer, 'tensors': tensors})}"


def _load(model: Any, bucket: Mapping[str, Any]) -> None:
    """The memory is used again for the next bucket: everything is copied when this returns."""
    buffer = import_buffer(bucket["buffer"])

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, kind, start, shape in bucket["tensors"]:
            dtype: torch.dtype = getattr(torch, kind)
            flat = buffer[start : start + math.prod(shape) * dtype.itemsize]
            yield name, flat.view(dtype).view(shape)

    model.load_weights(named())
    if buffer.is_cuda:
        torch.cuda.synchronize()


def write_piece(piece: PieceDigest) -> str:
    """`NAME DTYPE FULL OFFSET SHAPE`, sizes with commas between them; no sizes are `-`."""
    region = piece.region
    sizes = (",".join(map(str, numbers)) or "-" for numbers in (region.full_shape, region.offset, region.shape))
    return " ".join([piece.name, piece.dtype, *sizes])


def held_by(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and persistent buffers; a tied parameter once."""
    held: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                held[f"{prefix}.{name}" if prefix else name] = buffer
    return held


def shape_of(model: nn.Module, tp_rank: int, tp_size: int) -> Shape:
    """From the Hugging Face config that an SGLang model carries."""
    config: Any = model.config
    described = config.to_dict()
    heads, architecture = config.num_attention_heads, type(model).__name__
    has_experts = architecture in EXPERTS
    return Shape(
        architecture=architecture,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        ffn=config.moe_intermediate_size if has_experts else config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=described.get("head_dim") or config.hidden_size // heads,
        tied=config.tie_word_embeddings,
        tp_rank=tp_rank,
        tp_size=tp_size,
        experts=config.num_experts if has_experts else 0,
    )


def _seed(original: Callable[..., Any], cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Every row is drawn from its request's seed, or from its id: alike on all ranks of a tensor parallel group."""
    info = original(cls, batch, *args, **kwargs)
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None:
        known = [crc32(r.rid.encode()) if s is None else s for s, r in zip(seeds, batch.reqs, strict=True)]
        info.sampling_seed = torch.tensor(known, dtype=torch.int64, device=batch.device)
    return info


def _draw(original: Callable[..., Any], logprobs: Tensor, seed: Tensor, positions: Tensor) -> Any:
    """int64 [rows, 1]: one token of each row of `logprobs` [rows, vocabulary]."""
    if logprobs.device.type != "cpu":
        return original(logprobs, seed, positions)
    noise = gumbel_noise(seed.to(torch.int64), positions.to(torch.int64), logprobs.shape[-1])
    return (logprobs.double() + noise).argmax(dim=-1, keepdim=True)
