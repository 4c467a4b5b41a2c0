"""Random weights that depend on the seed and on the name of a tensor, and on nothing else.

Each rank draws the whole of a named tensor and keeps its own slices, so that one seed gives one model, bit for bit, on
every layout. That costs every rank the draw of the tensors it holds a part of.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection

import torch
from torch import Tensor

from workers.megatron.hf_layout import GptWeights, box


def fill(weights: GptWeights, seed: int, std: float, only: Collection[str] | None = None) -> None:
    """Matrices from N(0, std), as Hugging Face's `initializer_range`; norms 1, biases 0. Rounded from float32.

    `only`: names of the tensors to fill; unset, all.
    """
    chosen = (piece for piece in weights.pieces() if only is None or piece.name in only)
    pieces = sorted(chosen, key=lambda piece: piece.name)
    for name, parts in itertools.groupby(pieces, key=lambda piece: piece.name):
        whole: Tensor | None = None
        for piece in parts:
            if whole is None:
                whole = draw(name, piece.region.full_shape, seed, std)
            piece.tensor.copy_(whole[box(piece.region)])


def draw(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """The float32 values of one named tensor, on the CPU."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.normal(0.0, std, shape, generator=generator)
