"""The ranks of one training role agree unanimously, or nothing happens.

attest (each rank) -> agree (pure, on the driver) -> Quorum -> publishing/saving (each rank checks its part of the
quorum) -> ActorPermit. Senders and checkpoint writers take the permit as an argument; there is no other way to one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from state.digest import MASK64, Region, ShardDigest, TensorDigest, summarise
from state.errors import InvariantViolation
from state.slots import PRIMARY_SLOTS, Slot, WeightId, WorkerId

Purpose = Literal["publish", "save"]


class GangDisagreement(InvariantViolation):
    """The ranks of a gang do not hold the same, clean, recorded weights. `problems` has one line per finding."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("the gang does not agree:\n" + "\n".join(f"  - {p}" for p in self.problems))


class PermitVoid(InvariantViolation):
    """Weights were to be read outside the scope, or for another purpose, than the gang had agreed to."""


@dataclass(frozen=True, slots=True)
class GangId:
    """Which gang a rank belongs to: its size, which start of the run this is, and what it was configured with."""

    world_size: int
    incarnation: int
    config_hash: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A slot beside the primary that a checkpoint must hold, on one rank: its bytes hashed where they rest, and the
    summary recorded when they were filled."""

    slot: Slot
    version: int
    resting: ShardDigest
    recorded: str


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The same, agreed on by all ranks: summaries by rank, and digests of the whole tensors."""

    slot: Slot
    version: int
    summaries: tuple[str, ...]
    tensors: tuple[TensorDigest, ...]

    @property
    def digest(self) -> str:
        return fingerprint(self.tensors)


@dataclass(frozen=True, slots=True)
class Attestation:
    """What one rank swears to. `live` is hashed from the bytes that the model computes with; None: it has none."""

    worker: WorkerId
    gang: GangId
    state: str
    slot: Slot | None
    version: int | None
    live: ShardDigest | None
    recorded: str | None
    transition: int
    detail: str = ""
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True)
class Quorum:
    """The attestations of all ranks, found unanimous. Single use; void on a rank that moved since it attested.

    `transitions` and `summaries` are indexed by rank. `tensors` are the digests of the whole tensors, summed over
    shards, sorted by name. `holders` says for each tensor which ranks hold it, one replica of each region.
    """

    publish_id: str
    run: str
    role: str
    slot: Slot
    weights: WeightId
    config_hash: str
    transitions: tuple[int, ...]
    summaries: tuple[str, ...]
    tensors: tuple[TensorDigest, ...]
    holders: Mapping[str, tuple[tuple[int, Region], ...]]
    kept: tuple[KeptWeights, ...] = ()

    @property
    def digest(self) -> str:
        return fingerprint(self.tensors)


def fingerprint(tensors: Iterable[TensorDigest]) -> str:
    """One short fingerprint of all tensors, for people."""
    return summarise(f"{t.name} {t.dtype} {t.shape} {t.value:016x}" for t in tensors)


def agree(attestations: Iterable[Attestation], publish_id: str) -> Quorum:
    """Find the ranks unanimous, or raise GangDisagreement with every finding and the ranks it is about."""
    by_rank = sorted(attestations, key=lambda a: a.worker.rank)
    _refuse(_completeness(by_rank))
    _refuse([*_cleanliness(by_rank), *_unanimity(by_rank)])
    tensors, holders, findings = _compose([(a.worker.rank, a.live) for a in by_rank if a.live is not None])
    _refuse(findings)
    kept = _kept(by_rank)
    first = by_rank[0]
    assert first.slot is not None
    assert first.version is not None
    return Quorum(
        publish_id=publish_id,
        run=first.worker.run,
        role=first.worker.role,
        slot=first.slot,
        weights=WeightId(first.gang.incarnation, first.version),
        config_hash=first.gang.config_hash,
        transitions=tuple(a.transition for a in by_rank),
        summaries=tuple(a.live.summary for a in by_rank if a.live is not None),
        tensors=tensors,
        holders=holders,
        kept=kept,
    )


def _kept(by_rank: Sequence[Attestation]) -> tuple[KeptWeights, ...]:
    """What the ranks hold beside the primary; `_unanimity` found them to hold the same slots and versions."""
    agreed, findings = [], []
    for parts in zip(*(a.kept for a in by_rank), strict=True):
        slot, version = parts[0].slot, parts[0].version
        for rank, part in enumerate(parts):
            if part.resting.summary != part.recorded:
                findings.append(f"rank {rank} holds {slot}@{version} as {part.resting.summary}, not {part.recorded}")
        tensors, _, wrong = _compose([(rank, part.resting) for rank, part in enumerate(parts)])
        findings.extend(f"{slot}@{version}: {one}" for one in wrong)
        agreed.append(KeptWeights(slot, version, tuple(part.resting.summary for part in parts), tensors))
    _refuse(findings)
    return tuple(agreed)


def _refuse(findings: Sequence[str]) -> None:
    if findings:
        raise GangDisagreement(findings)


def _completeness(by_rank: Sequence[Attestation]) -> list[str]:
    if not by_rank:
        return ["nobody attested"]
    if differing := _differing("gang size", by_rank, lambda a: a.gang.world_size):
        return differing
    expected, present = set(range(by_rank[0].gang.world_size)), [a.worker.rank for a in by_rank]
    findings = []
    if missing := sorted(expected - set(present)):
        findings.append(f"{_ranks(missing)} did not attest")
    if extra := sorted(r for r, times in Counter(present).items() if r not in expected or times > 1):
        findings.append(f"{_ranks(extra)} attested twice or do not belong to a gang of {len(expected)}")
    return findings


def _cleanliness(by_rank: Sequence[Attestation]) -> list[str]:
    findings = []
    for a in by_rank:
        if a.slot not in PRIMARY_SLOTS or a.state != f"resident.{a.slot}":
            why = f" ({a.detail})" if a.detail else ""
            findings.append(f"rank {a.worker.rank} is in state {a.state}{why}; only a resident primary can leave it")
        elif a.live is None or a.live.summary != a.recorded:
            live = None if a.live is None else a.live.summary
            findings.append(
                f"rank {a.worker.rank} has live bytes {live} but recorded {a.recorded} for {a.slot}@{a.version}"
            )
    return findings


def _unanimity(by_rank: Sequence[Attestation]) -> list[str]:
    questions: dict[str, Callable[[Attestation], Hashable]] = {
        "run and role": lambda a: f"{a.worker.run}/{a.worker.role}",
        "slot": lambda a: a.slot,
        "version": lambda a: a.version,
        "incarnation": lambda a: a.gang.incarnation,
        "config": lambda a: a.gang.config_hash,
        "what is kept beside it": lambda a: ", ".join(f"{k.slot}@{k.version}" for k in a.kept) or "nothing",
    }
    return [finding for question, answer in questions.items() for finding in _differing(question, by_rank, answer)]


def _differing(question: str, by_rank: Sequence[Attestation], answer: Callable[[Attestation], Hashable]) -> list[str]:
    ranks_by_answer: dict[Hashable, list[int]] = defaultdict(list)
    for a in by_rank:
        ranks_by_answer[answer(a)].append(a.worker.rank)
    if len(ranks_by_answer) == 1:
        return []
    return [f"{question} differs: " + "; ".join(f"{_ranks(r)}: {value}" for value, r in ranks_by_answer.items())]


# Of one named tensor: for each region of it, which ranks hold it with which (dtype, digest).
_Held = dict[Region, dict[tuple[str, int], list[int]]]


def _compose(
    shards_by_rank: Sequence[tuple[int, ShardDigest]],
) -> tuple[tuple[TensorDigest, ...], dict[str, tuple[tuple[int, Region], ...]], list[str]]:
    """Add shards up to whole tensors. Ranks with equal shard summaries are replicas: one of them speaks for all."""
    replicas: dict[str, list[int]] = defaultdict(list)
    shards: dict[str, ShardDigest] = {}
    for rank, shard in shards_by_rank:
        replicas[shard.summary].append(rank)
        shards[shard.summary] = shard
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
            findings.append(f"shards of {name} differ in dtype: " + "; ".join(f"{_ranks(r)}: {d}" for d, r in by_dtype))
        shape = next(iter(regions)).full_shape
        tensors.append(TensorDigest(name, dtypes[0], shape, sum(value for _, value in said.values()) & MASK64))
        holders[name] = tuple((min(held[said[region]]), region) for region, held in regions.items())
    return tuple(tensors), holders, findings


def _differing_replicas(name: str, regions: _Held) -> list[str]:
    findings = []
    for region, held in regions.items():
        if len(held) > 1:
            said = "; ".join(f"{_ranks(ranks)}: {dtype} {value:016x}" for (dtype, value), ranks in held.items())
            findings.append(f"the same shard of {name} (at {region.offset}) has different bytes: {said}")
    return findings


def _coverage(name: str, regions: _Held) -> list[str]:
    boxes = list(regions)

    def ranks(region: Region) -> str:
        return _ranks(_all_ranks([regions[region]]))

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
        holders = _ranks(_all_ranks(regions.values()))
        findings.append(
            f"shards of {name} hold {held} of its {full} elements, on {holders}: some rank's part is missing"
        )
    return findings


def _all_ranks(held: Iterable[Mapping[tuple[str, int], Sequence[int]]]) -> list[int]:
    return sorted({rank for by_value in held for ranks in by_value.values() for rank in ranks})


def _overlap(a: Region, b: Region) -> bool:
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))


def _ranks(ranks: Sequence[int]) -> str:
    distinct = sorted(set(ranks))
    return f"rank {distinct[0]}" if len(distinct) == 1 else f"ranks {', '.join(map(str, distinct))}"


class ActorPermit:
    """Leave to read the agreed weights for one purpose, while the machine that handed it out stays in that state.

    Only `SlotMachine` makes permits: `_minted_by` must be its own mint, which no other module can reach by accident.
    """

    def __init__(self, quorum: Quorum, purpose: Purpose, _minted_by: object) -> None:
        if _minted_by is not _MINT:
            raise PermitVoid("a permit is handed out by SlotMachine.publishing() or .saving(), never constructed")
        self.quorum = quorum
        self.purpose = purpose
        self._valid = True

    @property
    def weights(self) -> WeightId:
        return self.quorum.weights

    def require(self, purpose: Purpose) -> None:
        """Raise PermitVoid unless this permit is for `purpose` and its scope has not ended."""
        if not self._valid:
            raise PermitVoid(f"the permit {self.quorum.publish_id} has ended: its {self.purpose} is over")
        if purpose != self.purpose:
            raise PermitVoid(f"the permit {self.quorum.publish_id} is for {self.purpose}, not for {purpose}")

    def revoke(self) -> None:
        self._valid = False

    def __reduce__(self) -> NoReturn:
        raise PermitVoid(
            f"the permit {self.quorum.publish_id} cannot be copied or sent: a copy would outlive its scope"
        )


_MINT = object()


def mint_permit(quorum: Quorum, purpose: Purpose) -> ActorPermit:
    """For SlotMachine alone: the caller has checked that `quorum` holds for its rank."""
    return ActorPermit(quorum, purpose, _MINT)
