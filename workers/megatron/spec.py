"""All that a training worker is told when it starts: plain values, fixed for its life."""

from __future__ import annotations

from dataclasses import dataclass

from state.gang import GangId
from state.resume import LoadSpec
from state.slots import Slot, Tier, WorkerId
from workers.config import AlgorithmConfig, ModelConfig, TrainConfig, WeightsConfig


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One slot to fill at start, and what its weights were trained for."""

    slot: Slot
    load: LoadSpec
    version: int
    tier: Tier
    fresh_head: bool = False
    """Of a critic: what is loaded is a policy, which has no value head; a new one is drawn from the seed."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`slots` are filled in this order; the first is the primary. `load_optimizer` and `load_rng` are about it."""

    worker: WorkerId
    gang: GangId
    run_dir: str
    host: str | None
    """Address of this node that the others reach; None: what Ray knows it by. Loopback for a cluster of one node."""
    seed: int
    slots: tuple[SlotSpec, ...]
    load_optimizer: bool
    load_rng: bool
    total_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    temperature: float
    """Of the rollouts: log-probs are of the policy at this temperature."""
    max_response_len: int
    """Of the rollouts, in tokens."""
    keep_old_actors: int
    """Published versions of the actor to keep as `old_actor`; 0: the worker has no such slot."""
    ref_update_interval: int | None
    """Refresh the reference from the actor after every so many rollouts of the run. None: never."""
    value_clip: float | None
    """Of a critic: see `CriticConfig`."""
    model: ModelConfig
    train: TrainConfig
    """Of this role: a critic's has the optimizer of section `critic`."""
    algorithm: AlgorithmConfig
    weights: WeightsConfig
