"""Whether what a run continues with is what was saved: a gang's answers on a fixed batch, before and after a restart.

Values alone; `workers/megatron/probe.py` takes a probe, the driver compares. Weights, reference and optimizer are each
seen through what they do: a plan can be right and what was loaded wrong all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from state.slots import Slot

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a gang computes on the fixed batch. Of a critic `logprobs` are its values, which serve the same end.

    `logprobs` and `ref_logprobs` (None: no reference is held) of the same tokens in the same order. `grad_norm`: of
    their mean log-prob under the actor, over all ranks. `optimizer_steps`: those that Adam has counted; `moments`: norm
    of its first and of its second moments over all ranks.
    """

    dtype: Dtype
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    grad_norm: float
    optimizer_steps: int
    moments: tuple[float, float]

    def __post_init__(self) -> None:
        if self.ref_logprobs is not None and len(self.ref_logprobs) != len(self.logprobs):
            raise ValueError(f"{len(self.logprobs)} log-probs of the actor, {len(self.ref_logprobs)} of the reference")

    @property
    def kl_to_ref(self) -> float | None:
        """Estimator k3 (Schulman, 2020) over the batch's tokens; it serves as a distance, the tokens being fixed."""
        if self.ref_logprobs is None:
            return None
        ratios = [ref - own for own, ref in zip(self.logprobs, self.ref_logprobs, strict=True)]
        return sum(_k3(ratio) for ratio in ratios) / max(1, len(ratios))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What another layout or order of additions may change. `logprobs`: mean |difference|, nats; the rest relative."""

    logprobs: float
    kl: float
    kl_floor: float
    """Absolute: below it, a KL is noise."""
    grad_norm: float
    moments: float = 1e-3
    """Moments are float32 whatever the model is."""


LIMITS: Mapping[Dtype, Limits] = {
    "float32": Limits(logprobs=1e-4, kl=0.05, kl_floor=1e-8, grad_norm=1e-2),
    "bfloat16": Limits(logprobs=0.1, kl=0.5, kl_floor=0.01, grad_norm=0.25),
}


def breaks(before: Probe, after: Probe, *, with_optimizer: bool, role: str = Slot.ACTOR) -> tuple[str, ...]:
    """In words, everything that jumped between a save and what was loaded from it; empty: the run continues."""
    what, unit = ("values", "") if role == Slot.CRITIC else ("log-probs", " nats")
    limits = LIMITS["float32" if before.dtype == after.dtype == "float32" else "bfloat16"]
    found = []
    if (gap := _gap(before.logprobs, after.logprobs)) > limits.logprobs:
        found.append(
            f"{what} of the {role} are off by {gap:.3g}{unit} on average (at most {limits.logprobs:g} is rounding): "
            "these are not the weights that were saved"
        )
    found += _reference(before, after, limits)
    if not _near(before.grad_norm, after.grad_norm, limits.grad_norm):
        found.append(f"the gradient norm on the probe batch is {after.grad_norm:.6g}, it was {before.grad_norm:.6g}")
    if with_optimizer:
        found += _optimizer(before, after, limits)
    return tuple(found)


def _reference(before: Probe, after: Probe, limits: Limits) -> list[str]:
    if before.ref_logprobs is None or after.ref_logprobs is None:
        return []
    assert before.kl_to_ref is not None
    assert after.kl_to_ref is not None
    found = []
    if after.ref_logprobs == after.logprobs and before.ref_logprobs != before.logprobs:
        # The same weights compute the same to the bit, in any precision: a small distance that vanished is seen too.
        found.append("the reference computes exactly what the actor does, and did not before")
    if (gap := _gap(before.ref_logprobs, after.ref_logprobs)) > limits.logprobs:
        found.append(
            f"log-probs of the reference are off by {gap:.3g} nats on average (at most {limits.logprobs:g} is "
            "rounding): it is another reference than before"
        )
    if not _near(before.kl_to_ref, after.kl_to_ref, limits.kl, limits.kl_floor):
        found.append(f"KL to the reference is {after.kl_to_ref:.3g}, it was {before.kl_to_ref:.3g}")
    return found


def _optimizer(before: Probe, after: Probe, limits: Limits) -> list[str]:
    found = []
    if before.optimizer_steps != after.optimizer_steps:
        found.append(f"the optimizer has taken {after.optimizer_steps} steps, it had {before.optimizer_steps}")
    for name, was, now in zip(("first", "second"), before.moments, after.moments, strict=True):
        if not _near(was, now, limits.moments):
            found.append(f"the norm of the optimizer's {name} moments is {now:.6g}, it was {was:.6g}")
    return found


def _k3(ratio: float) -> float:
    try:
        return math.expm1(ratio) - ratio
    except OverflowError:
        return math.inf


def _gap(before: Sequence[float], after: Sequence[float]) -> float:
    """Mean |difference|; infinite where the batches are not the same, or something is not finite."""
    if len(before) != len(after):
        return math.inf
    gap = sum(abs(a - b) for a, b in zip(before, after, strict=True)) / max(1, len(before))
    return gap if math.isfinite(gap) else math.inf


def _near(before: float, after: float, relative: float, floor: float = 0.0) -> bool:
    return abs(before - after) <= max(relative * abs(before), floor)
