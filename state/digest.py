"""Fingerprints of weights that add up over shards.

The digest of a named tensor is the sum, mod 2^64, over its elements of

    (raw bits of the element, unsigned, of its width) x mix(index of the element in the full tensor)

where `mix` is an odd-valued 64-bit mixer (`state.mixing`). A sum over global positions composes: every rank hashes its
own slices where they stand, and the digests of disjoint slices that cover a tensor add up to the digest of the whole,
before anything was gathered or converted.

The code here is the definition, and runs on any device; a kernel where there is one computes the same sums. At import
only torch is needed, so that this file also runs inside an engine's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from state.digest_records import (
    MASK64,
    PieceDigest,
    Region,
    ShardDigest,
    TensorDigest,
    about,
    by_place,
    summarise,
)
from state.mixing import splitmix, within_run
from state.rows import Block, blocks, rows_of

_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25
"""Elements hashed at once: what a CPU's caches hold with all temporaries, and what keeps a GPU busy."""
_WORTH_A_KERNEL = 1 << 26
"""Bytes on a CPU from which on its kernel is used: to load it takes as long as to hash some hundred megabytes here."""
_RAW_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a named (Hugging Face) tensor that stands in local memory.

    `tensor` is a view of live memory whose shape is `region.shape`; it need not be contiguous. Writing to it fills
    the weights, hashing it fingerprints them, sending it publishes them.
    """

    name: str
    region: Region
    tensor: Tensor


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest_region(tensor: Tensor, region: Region) -> int:
    """The contribution of `tensor`, which is `region` of a full tensor, to that tensor's digest; in [0, 2^64)."""
    return _finish(_start([(tensor, region)]))[0]


def _start(parts: Sequence[tuple[Tensor, Region]]) -> list[tuple[list[int], Tensor]]:
    """Have every part hashed. By device: numbers of parts, and their sums there, which nothing has waited for."""
    by_device: dict[torch.device, list[int]] = {}
    for number, (tensor, region) in enumerate(parts):
        if tensor.shape != region.shape:
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} is not {region}")
        if tensor.is_complex():
            raise TypeError("complex tensors have no digest")
        by_device.setdefault(tensor.device, []).append(number)
    started = []
    for device, numbers in by_device.items():
        held = [parts[number] for number in numbers]
        started.append((numbers, _kernel(device, held)(held)))
    return started


def _finish(started: Iterable[tuple[list[int], Tensor]]) -> list[int]:
    """The contribution of each part. One wait for each device, not one for each part."""
    found = {n: value & MASK64 for numbers, sums in started for n, value in zip(numbers, sums.tolist(), strict=True)}
    return [found[number] for number in range(len(found))]


def _kernel(device: torch.device, held: Sequence[tuple[Tensor, Region]]) -> Callable[..., Tensor]:
    """What is fastest for these, which are all on this device."""
    if device.type == "cuda" and find_spec("triton"):
        from state import digest_cuda

        return digest_cuda.sums
    nbytes = sum(region.numel * tensor.element_size() for tensor, region in held)
    if device.type == "cpu" and nbytes >= _WORTH_A_KERNEL and find_spec("numba"):
        from state import digest_cpu

        return digest_cpu.sums
    return eager_sums


def eager_sums(held: Sequence[tuple[Tensor, Region]]) -> Tensor:
    """The definition: what each part contributes to the digest of its tensor, int64 [parts]. All are on one device."""
    device = held[0][0].device
    low = within_run(device)
    totals = torch.zeros(len(held), dtype=torch.int64, device=device)
    for total, (tensor, region) in zip(totals, held, strict=True):
        # Unsigned integers; 8-byte elements as int64, whose products wrap alike.
        bits = tensor.detach().view(_RAW_BITS[tensor.element_size()])
        for rows in rows_of(tensor, region.full_shape, region.offset, region.shape):
            for block in blocks(rows):
                _add(total, bits, block, low)
    return totals


def _add(total: Tensor, bits: Tensor, block: Block, low: Tensor) -> None:
    chunk = _CPU_CHUNK if bits.device.type == "cpu" else _DEVICE_CHUNK
    at_once = max(1, chunk // block.width)
    low = low[block.low : block.low + block.width]
    high = torch.arange(block.height, dtype=torch.int64, device=bits.device).mul_(block.high_step).add_(block.high)
    high = splitmix(high)
    start = bits.storage_offset() + block.start
    rows = bits.as_strided((block.height, block.width), (block.step, block.stride), start)
    for first in range(0, block.height, at_once):
        weighted = rows[first : first + at_once].to(torch.int64, copy=True).mul_(low).sum(1)
        total += weighted.mul_(high[first : first + at_once]).sum()


def digest_pieces(pieces: Iterable[Piece]) -> ShardDigest:
    """Hash every piece where it stands."""
    held = sorted(pieces, key=by_place)
    started = _start([(piece.tensor, piece.region) for piece in held])
    # A GPU hashes meanwhile; there are thousands of pieces.
    dtypes = [dtype_name(piece.tensor.dtype) for piece in held]
    abouts = [about(piece.name, dtype, piece.region) for piece, dtype in zip(held, dtypes, strict=True)]
    values = _finish(started)
    digests = map(PieceDigest, (p.name for p in held), dtypes, (p.region for p in held), values)
    return ShardDigest(
        tuple(digests), summarise(f"{about} {value:016x}" for about, value in zip(abouts, values, strict=True))
    )


def digest_tensors(tensors: Mapping[str, Tensor]) -> tuple[TensorDigest, ...]:
    """The digests of whole tensors that stand here, each in one piece; by name, in its order."""
    named = sorted(tensors.items())
    values = _finish(_start([(tensor, Region.whole(tensor.shape)) for _, tensor in named]))
    return tuple(
        TensorDigest(name, dtype_name(tensor.dtype), tuple(tensor.shape), value)
        for (name, tensor), value in zip(named, values, strict=True)
    )


def digest_tensor(name: str, tensor: Tensor) -> TensorDigest:
    """The digest of a whole tensor that stands here in one piece."""
    (digest,) = digest_tensors({name: tensor})
    return digest
