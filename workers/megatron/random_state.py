"""The state of every random number generator of this process, as values that can be saved."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

RandomState = dict[str, Any]


def capture() -> RandomState:
    """Python's, NumPy's, torch's (of the CPU, and of this rank's GPU where it computes on one), and Megatron's."""
    algorithm, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": random.getstate(),
        # As a tensor: checkpoints are read without unpickling anything else.
        "numpy": (algorithm, torch.from_numpy(numpy.asarray(keys).astype("int64")), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _computes_on_gpu() else None,
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }


def restore(state: RandomState) -> None:
    """Continue every generator where `capture` found it."""
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    algorithm, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((algorithm, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and _computes_on_gpu():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    get_cuda_rng_tracker().set_states(state["megatron"])


def _computes_on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
