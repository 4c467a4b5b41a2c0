"""How the ranks of a gang divide a model: process groups, and where this rank stands in them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from workers.device import Device


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the gang. Ranks are numbered tensor parallel first, then data parallel, then pipeline."""

    world_size: int
    tp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def check(self) -> None:
        """Raises ValueError when the sizes do not multiply out."""
        if min(self.world_size, self.tp, self.pp) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"{self.world_size} ranks do not divide into tensor parallel {self.tp} x pipeline parallel {self.pp}; "
                f"use a multiple of {self.tp * self.pp}"
            )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in its gang."""

    rank: int
    tp: int
    pp: int
    dp: int
    is_first_stage: bool
    is_last_stage: bool


def initialise(
    rank: int, layout: Layout, meeting: str | dist.Store, seed: int, device: Device, timeout_s: float
) -> Coordinates:
    """Join the gang (gloo on `cpu`, nccl on `cuda`), make Megatron's groups, seed every generator of this process.

    `meeting` is a store that all ranks share, or torch's init method (`tcp://host:port`, `file:///path`). Every rank
    waits at most `timeout_s` for the others, here and in later collectives. Called inside `cpu.redirect(device)`.
    """
    layout.check()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend={"cpu": "gloo", "cuda": "nccl"}[device],
        init_method=meeting if isinstance(meeting, str) else None,
        store=None if isinstance(meeting, str) else meeting,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    random.seed(seed)
    torch.manual_seed(seed)
    # Dropout is 0 everywhere, so no region draws random numbers of its own: the tracker that forks nothing will do,
    # and it is the one that runs without CUDA's generators.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    return coordinates()


def coordinates() -> Coordinates:
    """This rank's place. Needs `initialise`."""
    return Coordinates(
        rank=dist.get_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def shutdown() -> None:
    """Leave the gang; `initialise` may be called again afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
