"""The proof that an engine of several processes gives together: their digests added up to whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from state.digest_records import MASK64, PieceDigest, Region, TensorDigest
from workers.rollout.protocol import WeightsMismatch


def read_pieces(checksums: Mapping[str, str]) -> tuple[PieceDigest, ...]:
    """What `sglang_plugin.write_piece` wrote."""
    found = []
    for line, value in checksums.items():
        name, dtype, *sizes = line.split(" ")
        full, offset, shape = (() if s == "-" else tuple(map(int, s.split(","))) for s in sizes)
        found.append(PieceDigest(name, dtype, Region(full, offset, shape), int(value, 16)))
    return tuple(found)


def compose(ranks: Sequence[Mapping[str, Any]], tp_size: int) -> tuple[TensorDigest, ...]:
    """Whole tensors, sorted by name, from the answer of each tensor parallel rank.

    A piece that several ranks hold counts once, and must be the same on all of them. `WeightsMismatch` says what
    differs between ranks, does not fit together or is missing.
    """
    answered = sorted(_tp_rank(rank["parallelism_info"]) for rank in ranks)
    if answered != list(range(tp_size)):
        raise WeightsMismatch(f"digests came from tensor parallel ranks {answered}, wanted all of {tp_size}")
    held: dict[str, dict[Region, PieceDigest]] = {}
    for rank in ranks:
        for piece in read_pieces(rank["checksums"]):
            said = held.setdefault(piece.name, {}).setdefault(piece.region, piece)
            if said != piece:
                raise WeightsMismatch(f"ranks of one engine hold different bytes of {piece.name} at {piece.region}")
    return tuple(_whole(name, held[name]) for name in sorted(held))


def _tp_rank(who: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Newer servers list the models of a rank, a draft model among them; all have the same place."""
    return int(who["tp_rank"] if isinstance(who, Mapping) else who[0]["tp_rank"])


def _whole(name: str, parts: Mapping[Region, PieceDigest]) -> TensorDigest:
    kinds = {(piece.dtype, region.full_shape) for region, piece in parts.items()}
    if len(kinds) > 1:
        raise WeightsMismatch(f"ranks of one engine disagree about what {name} is: {sorted(kinds)}")
    ((dtype, shape),) = kinds
    count, full = sum(region.numel for region in parts), Region.whole(shape).numel
    if count != full:
        raise WeightsMismatch(f"the engine holds {count} of {full} elements of {name}")
    return TensorDigest(name, dtype, shape, sum(piece.value for piece in parts.values()) & MASK64)
