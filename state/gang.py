"""The ranks of one training role agree unanimously, or nothing happens.

attest (each rank) -> agree (pure, on the driver) -> Quorum -> publishing/saving (each rank checks its part of the
quorum) -> ActorPermit. Senders and checkpoint writers take the permit as an argument; there is no other way to one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from state.digest_records import Region, ShardDigest, TensorDigest, summarise
from state.errors import InvariantViolation
from state.shards import compose, name_ranks, replica_numbers
from state.slots import PRIMARY_SLOTS, Slot, SlotRecord, WeightId, WorkerId

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
    """What one rank swears to. `live` is hashed from the bytes that the model computes with; None: it has none.

    `changed` are names of tensors whose live bytes are not those recorded.
    """

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
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quorum:
    """The attestations of all ranks, found unanimous. Single use; void on a rank that moved since it attested.

    `transitions` and `summaries` are indexed by rank. `tensors` are the digests of the whole tensors, summed over
    shards, sorted by name. `holders` says for each tensor which ranks hold it, one replica of each region. `replicas`
    are indexed by rank: ranks with equal numbers hold the same pieces.
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
    replicas: tuple[int, ...] = ()

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
    shards = [(a.worker.rank, a.live) for a in by_rank if a.live is not None]
    tensors, holders, findings = compose(shards)
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
        summaries=tuple(shard.summary for _, shard in shards),
        tensors=tensors,
        holders=holders,
        kept=kept,
        replicas=replica_numbers(shards),
    )


def _kept(by_rank: Sequence[Attestation]) -> tuple[KeptWeights, ...]:
    """What the ranks hold beside the primary; `_unanimity` found them to hold the same slots and versions."""
    agreed, findings = [], []
    for parts in zip(*(a.kept for a in by_rank), strict=True):
        slot, version = parts[0].slot, parts[0].version
        for rank, part in enumerate(parts):
            if part.resting.summary != part.recorded:
                findings.append(f"rank {rank} holds {slot}@{version} as {part.resting.summary}, not {part.recorded}")
        tensors, _, wrong = compose([(rank, part.resting) for rank, part in enumerate(parts)])
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
        findings.append(f"{name_ranks(missing)} did not attest")
    if extra := sorted(r for r, times in Counter(present).items() if r not in expected or times > 1):
        findings.append(f"{name_ranks(extra)} attested twice or do not belong to a gang of {len(expected)}")
    return findings


def _cleanliness(by_rank: Sequence[Attestation]) -> list[str]:
    findings = []
    for a in by_rank:
        if a.slot not in PRIMARY_SLOTS or a.state != f"resident.{a.slot}":
            why = f" ({a.detail})" if a.detail else ""
            findings.append(f"rank {a.worker.rank} is in state {a.state}{why}; only a resident primary can leave it")
        elif a.live is None or a.live.summary != a.recorded:
            live = None if a.live is None else a.live.summary
            what = f"rank {a.worker.rank} has live bytes {live} but recorded {a.recorded} for {a.slot}@{a.version}"
            findings.append(
                f"{what}: {len(a.changed)} tensors changed, {', '.join(a.changed[:5])}" if a.changed else what
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
    return [f"{question} differs: " + "; ".join(f"{name_ranks(r)}: {value}" for value, r in ranks_by_answer.items())]


def why_void(
    quorum: Quorum, worker: WorkerId, gang: GangId, record: SlotRecord, transition: int, spent: Collection[str]
) -> str | None:
    """Why `quorum` lets nothing leave this rank, whose primary is recorded as `record`; None: it does let it leave.

    `transition` is the number of the rank's last one, `spent` are the publish ids that it has acted on.
    """
    rank = worker.rank
    if (quorum.run, quorum.role, quorum.config_hash) != (worker.run, worker.role, gang.config_hash):
        return f"it is of another gang, {quorum.run}/{quorum.role}"
    if quorum.publish_id in spent:
        return "it was used before"
    if len(quorum.transitions) != gang.world_size or quorum.transitions[rank] != transition:
        agreed = quorum.transitions[rank] if rank < len(quorum.transitions) else None
        return f"this rank attested at transition {agreed} and is now at {transition}"
    weights = (quorum.slot, quorum.weights.incarnation, quorum.weights.version, quorum.summaries[rank])
    if weights != (record.slot, gang.incarnation, record.version, record.digest):
        return f"it is about {weights}, not about the recorded {record}"
    return None


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
