"""Words for sets of weights: which slot, which version, where the bytes came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Slot(StrEnum):
    """One complete set of weights that a worker holds."""

    ACTOR = "actor"
    REF = "ref"
    TEACHER = "teacher"
    OLD_ACTOR = "old_actor"
    CRITIC = "critic"


SHORT_DIGEST = 12
"""Digits of a digest that people are shown."""
PRIMARY_SLOTS = (Slot.ACTOR, Slot.CRITIC)


def short_digest(digest: str) -> str:
    """What people are shown of a digest, everywhere alike."""
    return digest[:SHORT_DIGEST]


class Tier(StrEnum):
    """Where the bytes of a slot rest while another one is resident."""

    COPY = "copy"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, order=True)
class WeightId:
    """Names one set of actor weights in a run: which start of the gang, trained for how many rollout steps."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"

    @staticmethod
    def parse(text: str) -> WeightId:
        """What `str` wrote. `ValueError` for anything else."""
        incarnation, _, version = text.partition(".")
        if not (incarnation.isdecimal() and version.isdecimal()):
            raise ValueError(f"{text!r} names no weights; those are INCARNATION.VERSION, two numbers")
        return WeightId(int(incarnation), int(version))


@dataclass(frozen=True, slots=True)
class WorkerId:
    """One rank of one training role in one run."""

    run: str
    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.run}/{self.role}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the bytes of a slot came from."""

    kind: Literal["random", "huggingface", "checkpoint", "step", "snapshot"]
    detail: str
    iteration: int | None = None

    @staticmethod
    def random(seed: int) -> Provenance:
        return Provenance("random", f"seed {seed}")

    @staticmethod
    def huggingface(path: str) -> Provenance:
        return Provenance("huggingface", path)

    @staticmethod
    def checkpoint(path: str, iteration: int | None) -> Provenance:
        return Provenance("checkpoint", path, iteration)

    @staticmethod
    def step(rollout_id: int) -> Provenance:
        return Provenance("step", f"step {rollout_id}", rollout_id)

    @staticmethod
    def snapshot(version: int) -> Provenance:
        return Provenance("snapshot", f"snapshot of actor@{version}", version)

    def __str__(self) -> str:
        at = f" @ {self.iteration}" if self.kind == "checkpoint" and self.iteration is not None else ""
        return self.detail + at


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What is known of the bytes of one slot (of one version of it, for the old_actor ring).

    `digest` is the summary of this rank's shard, minted when the slot was filled or a step was committed.
    """

    slot: Slot
    version: int
    digest: str
    provenance: Provenance
    tier: Tier


@dataclass(frozen=True, slots=True)
class SlotView:
    """What one worker's machine is doing, at one moment: an immutable value, replaced at each transition.

    `slot` is whose the live bytes are, None when nobody's; `held` the record of them, None also while the optimizer
    changes them. `transition` counts this machine's transitions, `since` is the wall time of the last one, `trigger`
    its name, `detail` says why (poisoned: what happened).
    """

    worker: WorkerId
    world_size: int
    incarnation: int
    state: str
    transition: int
    trigger: str
    since: float
    slot: Slot | None = None
    held: SlotRecord | None = None
    detail: str = ""

    @property
    def resident(self) -> SlotRecord | None:
        """The record of the slot that the model computes with, None while anything is done with its bytes."""
        return self.held if self.state.startswith("resident") else None

    def to_json(self) -> dict[str, Any]:
        """The row that `slotwise slots` shows."""
        record = self.held
        return {
            "worker": str(self.worker),
            "role": self.worker.role,
            "rank": self.worker.rank,
            "world_size": self.world_size,
            "incarnation": self.incarnation,
            "state": self.state,
            "slot": self.slot,
            "version": record.version if record else None,
            "digest": record.digest if record else None,
            "provenance": str(record.provenance) if record else None,
            "tier": record.tier if record else None,
            "since": self.since,
            "transition": self.transition,
            "last_transition": self.trigger,
            "detail": self.detail,
        }
