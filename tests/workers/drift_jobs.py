"""Two real replicas, one of which goes its own way; and a publish that must not begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from orchestrator.publish import Publisher
from state.gang import GangDisagreement, Quorum
from tests.workers.gang_processes import Place
from tests.workers.rank_jobs import Setting, agreed, publish, rank_of, shard
from workers.megatron.worker import MegatronRank


@dataclass
class Gang:
    """`TrainGroup` of the ranks that call this together."""

    rank: MegatronRank

    def agree(self, publish_id: str) -> Quorum:
        return agreed(self.rank, publish_id)

    def begin_publish(self, quorum: Quorum) -> None:
        raise AssertionError("no rank may begin to publish")


@dataclass
class Engines:
    """Whatever is asked of them."""

    asked: list[str] = field(default_factory=list)

    def __getattr__(self, verb: str) -> Any:
        def ask(*args: Any) -> tuple[str, ...]:
            self.asked.append(verb)
            return ("engine",)

        return ask


@dataclass(frozen=True)
class Refused:
    """What the gang said, and what was asked of engines before."""

    problems: tuple[str, ...]
    asked: list[str]


def drifting(place: Place, setting: Setting) -> dict[str, Refused]:
    """Trained and published once; then one bit of one tensor flips on rank 1: in its memory, and in a step."""
    with rank_of(place, setting) as rank:
        publish(rank, "p0")
        rank.train(shard(rank, 0, 0))
        publish(rank, "p1")
        flips = place.rank == 1
        if flips:
            flip_one_bit(rank)
        told = {"memory": refused(rank, "p2")}
        if flips:
            flip_one_bit(rank)  # and back
        with rank._slots.step(1) as scope:
            scope.before_write()
            if flips:
                flip_one_bit(rank)
        return told | {"step": refused(rank, "p3")}


def refused(rank: MegatronRank, publish_id: str) -> Refused:
    engines = Engines()
    gang: Any = Gang(rank)
    everyone: Any = engines
    try:
        Publisher(gang, everyone, rank.journal, 1 << 20, 5.0).publish(publish_id)
    except GangDisagreement as error:
        return Refused(error.problems, engines.asked)
    raise AssertionError("two different replicas were found to be one")


def flip_one_bit(rank: MegatronRank) -> None:
    """The lowest bit of one weight, in the middle of a tensor that is cut over no rank."""
    (piece,) = (p for p in rank._weights.pieces() if p.name == NAME)
    bits = piece.tensor.detach().view(torch.int32)
    bits.view(-1)[bits.numel() // 2] ^= 1


NAME = "model.layers.1.mlp.down_proj.weight"
