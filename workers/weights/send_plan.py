"""Who sends what to the engines: decided once, from who holds what, and the same for every bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from state.digest_records import Region, TensorDigest
from workers.weights.buckets import Bucket, TensorSpec, pack

Holders = Mapping[str, tuple[tuple[int, Region], ...]]
"""Hugging Face name -> (rank, region) pairs that cover the tensor exactly once."""


@dataclass(frozen=True, slots=True)
class Stream:
    """All that one leader broadcasts, in order. `holders` says, by name, from which rank each region comes."""

    leader: int
    buckets: tuple[Bucket, ...]
    holders: Mapping[str, tuple[tuple[int, Region], ...]]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Every participant works through the streams in this order, so that nobody waits in a circle."""

    streams: tuple[Stream, ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(stream.leader for stream in self.streams)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(e.tensor for stream in self.streams for bucket in stream.buckets for e in bucket.entries)

    @property
    def nbytes(self) -> int:
        return sum(stream.nbytes for stream in self.streams)


def plan_send(holders: Holders, tensors: Sequence[TensorDigest], bucket_bytes: int) -> SendPlan:
    """Splits a publish over leaders and buckets. Pure.

    A tensor's leader is the lowest rank that holds a piece of it. Streams are ordered by leader, tensors within one
    as given. `ValueError` names a tensor that nobody holds, that is not published, or whose regions do not cover it.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"published twice: {sorted({n for n in names if names.count(n) > 1})}")
    if unheld := sorted(set(names) - holders.keys()):
        raise ValueError(f"no rank holds {unheld}")
    if unknown := sorted(holders.keys() - set(names)):
        raise ValueError(f"held but not published: {unknown}")
    by_leader: dict[int, list[TensorSpec]] = {}
    for tensor in tensors:
        pieces = holders[tensor.name]
        _check_cover(tensor, [region for _, region in pieces])
        leader = min(rank for rank, _ in pieces)
        by_leader.setdefault(leader, []).append(TensorSpec(tensor.name, tensor.dtype, tensor.shape))
    return SendPlan(
        tuple(
            Stream(leader, pack(specs, bucket_bytes), {spec.name: tuple(holders[spec.name]) for spec in specs})
            for leader, specs in sorted(by_leader.items())
        )
    )


def _check_cover(tensor: TensorDigest, regions: Sequence[Region]) -> None:
    if not regions:
        raise ValueError(f"no rank holds {tensor.name}")
    for region in regions:
        if region.full_shape != tensor.shape:
            raise ValueError(f"{tensor.name} is {list(tensor.shape)}, but a rank holds {region}")
    for i, one in enumerate(regions):
        for other in regions[:i]:
            if _overlap(one, other):
                raise ValueError(f"{tensor.name} is held twice: {one} and {other}")
    held, full = sum(region.numel for region in regions), Region.whole(tensor.shape).numel
    if held != full:
        raise ValueError(f"{tensor.name}: the ranks hold {held} of {full} elements")


def _overlap(one: Region, other: Region) -> bool:
    """Boxes meet in every dimension. Scalars have none, and two of them are the same element."""
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
