"""Shards of many ranks add up to whole tensors, or it is said which ranks' shards do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from state.digest_records import MASK64, Region, ShardDigest, TensorDigest

# Of one named tensor: for each region of it, which ranks hold it with which (dtype, digest).
_Held = dict[Region, dict[tuple[str, int], list[int]]]


def compose(
    shards_by_rank: Sequence[tuple[int, ShardDigest]],
) -> tuple[tuple[TensorDigest, ...], dict[str, tuple[tuple[int, Region], ...]], list[str]]:
    """Add shards up to whole tensors. Ranks with equal shard summaries are replicas: one of them speaks for all."""
    replicas: dict[str, list[int]] = defaultdict(list)
    shards: dict[str, ShardDigest] = {}
    for rank, shard in shards_by_rank:
        replicas[shard.summary].append(rank)
        shards.setdefault(shard.summary, shard)
    by_name: dict[str, _Held] = defaultdict(dict)
    for summary, shard in shards.items():
        for piece in shard.pieces:
            held = by_name[piece.name].setdefault(piece.region, {})
            held.setdefault((piece.dtype, piece.value), []).extend(replicas[summary])
    tensors, holders, findings = [], {}, []
    for name in sorted(by_name):
        regions = by_name[name]
        findings.extend([*_differing_replicas(name, regions), *_coverage(name, regions)])
        said = {region: next(iter(held)) for region, held in regions.items()}
        dtypes = sorted({dtype for dtype, _ in said.values()})
        if len(dtypes) > 1:
            by_dtype = [(d, _all_ranks(regions[r] for r in regions if said[r][0] == d)) for d in dtypes]
            findings.append(
                f"shards of {name} differ in dtype: " + "; ".join(f"{name_ranks(r)}: {d}" for d, r in by_dtype)
            )
        shape = next(iter(regions)).full_shape
        tensors.append(TensorDigest(name, dtypes[0], shape, sum(value for _, value in said.values()) & MASK64))
        holders[name] = tuple((min(held[said[region]]), region) for region, held in regions.items())
    return tuple(tensors), holders, findings


def replica_numbers(shards_by_rank: Sequence[tuple[int, ShardDigest]]) -> tuple[int, ...]:
    """For each rank, in order, a number: ranks with equal numbers hold the same pieces of the same tensors."""
    number_of: dict[str, int] = {}
    known: dict[tuple[tuple[str, Region], ...], int] = {}
    for _, shard in shards_by_rank:
        if shard.summary not in number_of:
            pieces = tuple((piece.name, piece.region) for piece in shard.pieces)
            number_of[shard.summary] = known.setdefault(pieces, len(known))
    return tuple(number_of[shard.summary] for _, shard in shards_by_rank)


def _differing_replicas(name: str, regions: _Held) -> list[str]:
    findings = []
    for region, held in regions.items():
        if len(held) > 1:
            said = "; ".join(f"{name_ranks(ranks)}: {dtype} {value:016x}" for (dtype, value), ranks in held.items())
            findings.append(f"the same shard of {name} (at {region.offset}) has different bytes: {said}")
    return findings


def _coverage(name: str, regions: _Held) -> list[str]:
    boxes = list(regions)
    if _is_tiled(boxes):
        return []

    def ranks(region: Region) -> str:
        return name_ranks(_all_ranks([regions[region]]))

    if len({r.full_shape for r in boxes}) > 1:
        said = "; ".join(f"{ranks(r)}: {r.full_shape}" for r in boxes)
        return [f"shards of {name} belong to tensors of different shapes: {said}"]
    findings = [
        f"shards of {name} overlap: {ranks(b)}: {b.offset}+{b.shape}; {ranks(a)}: {a.offset}+{a.shape}"
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if _overlap(a, b)
    ]
    held, full = sum(r.numel for r in boxes), Region.whole(boxes[0].full_shape).numel
    if not findings and held != full:
        holders = name_ranks(_all_ranks(regions.values()))
        findings.append(
            f"shards of {name} hold {held} of its {full} elements, on {holders}: some rank's part is missing"
        )
    return findings


def _is_tiled(boxes: Sequence[Region]) -> bool:
    """Whether they are the whole tensor, cut along at most one dimension: nearly all are, and it is quick to see."""
    full = boxes[0].full_shape
    if any(box.full_shape != full for box in boxes):
        return False
    cut = {
        d for box in boxes for d, (size, all_of_it) in enumerate(zip(box.shape, full, strict=True)) if size != all_of_it
    }
    if len(cut) != 1:
        return not cut and len(boxes) == 1
    (dim,) = cut
    end = 0
    for box in sorted(boxes, key=lambda b: b.offset[dim]):
        if box.offset[dim] != end:
            return False
        end += box.shape[dim]
    return end == full[dim]


def _all_ranks(held: Iterable[Mapping[tuple[str, int], Sequence[int]]]) -> list[int]:
    return sorted({rank for by_value in held for ranks in by_value.values() for rank in ranks})


def _overlap(a: Region, b: Region) -> bool:
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))


def name_ranks(ranks: Sequence[int]) -> str:
    """As findings name them: `rank 3`, `ranks 1, 2`."""
    distinct = sorted(set(ranks))
    return f"rank {distinct[0]}" if len(distinct) == 1 else f"ranks {', '.join(map(str, distinct))}"
