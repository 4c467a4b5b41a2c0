"""agree() is unanimous or names who differs; permits cannot be had any other way."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state.digest_records import MASK64, PieceDigest, Region, ShardDigest
from state.gang import ActorPermit, Attestation, GangDisagreement, GangId, PermitVoid, agree, mint_permit
from state.shards import replica_numbers
from state.slots import Slot, WeightId, WorkerId

ROOT = Path(__file__).resolve().parents[2]


def piece(name: str, offset: int, size: int, full: int, value: int, dtype: str = "bfloat16") -> PieceDigest:
    return PieceDigest(name, dtype, Region((full,), (offset,), (size,)), value)


def attestation(rank: int, pieces: list[PieceDigest], world_size: int = 4) -> Attestation:
    live = ShardDigest.of(pieces)
    gang = GangId(world_size, 2, "c0ffee")
    worker = WorkerId("run", "actor", rank)
    return Attestation(worker, gang, "resident.actor", Slot.ACTOR, 7, live, live.summary, 100 + rank)


def gang_of_four() -> list[Attestation]:
    """Two tensor-parallel halves of `up`, twice (data-parallel); `norm` on everyone."""
    return [attestation(r, [piece("up", 4 * (r % 2), 4, 8, 10 + r % 2), piece("norm", 0, 3, 3, 5)]) for r in range(4)]


def test_unanimous_ranks_become_a_quorum() -> None:
    quorum = agree(reversed(gang_of_four()), "p1")
    assert (quorum.slot, quorum.weights, quorum.publish_id) == (Slot.ACTOR, WeightId(2, 7), "p1")
    assert quorum.transitions == (100, 101, 102, 103)
    assert [(t.name, t.shape, t.value) for t in quorum.tensors] == [("norm", (3,), 5), ("up", (8,), 21)]
    assert quorum.holders["norm"] == ((0, Region((3,), (0,), (3,))),)
    assert quorum.holders["up"] == ((0, Region((8,), (0,), (4,))), (1, Region((8,), (4,), (4,))))
    assert len(set(quorum.summaries)) == 2


def test_whole_tensors_add_up_modulo_two_to_the_64() -> None:
    pair = [attestation(r, [piece("up", 4 * r, 4, 8, MASK64)], world_size=2) for r in range(2)]
    assert agree(pair, "p").tensors[0].value == MASK64 - 1


def test_the_fingerprint_of_the_whole_does_not_depend_on_the_layout() -> None:
    whole = attestation(0, [piece("up", 0, 8, 8, 21), piece("norm", 0, 3, 3, 5)], world_size=1)
    assert agree([whole], "p1").digest == agree(gang_of_four(), "p2").digest


def with_pieces(a: Attestation, pieces: list[PieceDigest]) -> Attestation:
    live = ShardDigest.of(pieces)
    return replace(a, live=live, recorded=live.summary)


Change = Callable[[Attestation], Attestation]
DISAGREEMENTS: dict[str, tuple[Change, str]] = {
    "another slot": (lambda a: replace(a, slot=Slot.REF, state="resident.ref"), r"rank 2 is in state resident\.ref"),
    "a label that says actor": (lambda a: replace(a, state="resident.ref"), r"rank 2 is in state resident\.ref"),
    "moving": (lambda a: replace(a, state="switching", slot=None, live=None), "rank 2 is in state switching"),
    "asleep": (lambda a: replace(a, state="asleep", slot=None, live=None), "rank 2 is in state asleep"),
    "poisoned": (
        lambda a: replace(a, state="poisoned", slot=None, live=None, detail="while loading: OSError"),
        r"rank 2 is in state poisoned \(while loading: OSError\)",
    ),
    "unclean": (lambda a: replace(a, recorded="feed"), "rank 2 has live bytes .* but recorded feed for actor@7"),
    "unclean, by name": (
        lambda a: replace(a, recorded="feed", changed=("norm",)),
        "rank 2 has live bytes .* but recorded feed for actor@7: 1 tensors changed, norm",
    ),
    "nothing live": (lambda a: replace(a, live=None), "rank 2 has live bytes None"),
    "version": (lambda a: replace(a, version=6), "version differs: ranks 0, 1, 3: 7; rank 2: 6"),
    "incarnation": (
        lambda a: replace(a, gang=replace(a.gang, incarnation=1)),
        "incarnation differs: ranks 0, 1, 3: 2; rank 2: 1",
    ),
    "config": (lambda a: replace(a, gang=replace(a.gang, config_hash="bad")), "config differs: .*rank 2: bad"),
    "gang size": (lambda a: replace(a, gang=replace(a.gang, world_size=5)), "gang size differs: .*rank 2: 5"),
    "run": (lambda a: replace(a, worker=replace(a.worker, run="other")), "run and role differs: .*rank 2: other/actor"),
    "role": (lambda a: replace(a, worker=replace(a.worker, role="critic")), "rank 2: run/critic"),
    "a replica": (
        lambda a: with_pieces(a, [piece("up", 0, 4, 8, 10), piece("norm", 0, 3, 3, 6)]),
        r"same shard of norm \(at \(0,\)\) has different bytes: .*rank 2: bfloat16 0{15}6",
    ),
    "dtype of a replica": (
        lambda a: with_pieces(a, [piece("up", 0, 4, 8, 10), piece("norm", 0, 3, 3, 5, "float32")]),
        "same shard of norm .*rank 2: float32",
    ),
    "overlap": (
        lambda a: with_pieces(a, [piece("up", 1, 4, 8, 10), piece("norm", 0, 3, 3, 5)]),
        r"shards of up overlap: .*rank 2: \(1,\)\+\(4,\)",
    ),
    "another shape": (
        lambda a: with_pieces(a, [piece("up", 0, 4, 9, 10), piece("norm", 0, 3, 3, 5)]),
        r"shards of up belong to tensors of different shapes: .*rank 2: \(9,\)",
    ),
}


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_every_kind_of_disagreement_names_the_rank(kind: str) -> None:
    change, message = DISAGREEMENTS[kind]
    gang = gang_of_four()
    gang[2] = change(gang[2])
    with pytest.raises(GangDisagreement, match=message):
        agree(gang, "p1")


def test_a_missing_a_doubled_and_a_foreign_rank_are_named() -> None:
    gang = gang_of_four()
    with pytest.raises(GangDisagreement, match="rank 3 did not attest"):
        agree(gang[:3], "p")
    with pytest.raises(GangDisagreement, match="rank 1 attested twice"):
        agree([*gang, gang[1]], "p")
    with pytest.raises(GangDisagreement, match="rank 9 attested twice or do not belong"):
        agree([*gang, replace(gang[0], worker=WorkerId("run", "actor", 9))], "p")
    with pytest.raises(GangDisagreement, match="nobody"):
        agree([], "p")


def test_a_part_that_nobody_holds_and_dtypes_that_differ_over_shards_are_found() -> None:
    halves = [attestation(r, [piece("up", 4 * (r % 2), 3, 8, 10 + r % 2)]) for r in range(4)]
    with pytest.raises(GangDisagreement, match="hold 6 of its 8 elements, on ranks 0, 1, 2, 3"):
        agree(halves, "p")
    mixed = [attestation(r, [piece("up", 4 * (r % 2), 4, 8, 1, ("bfloat16", "float32")[r % 2])]) for r in range(4)]
    with pytest.raises(GangDisagreement, match="differ in dtype: ranks 0, 2: bfloat16; ranks 1, 3: float32"):
        agree(mixed, "p")


def test_all_findings_are_told_at_once() -> None:
    gang = gang_of_four()
    gang[1], gang[3] = replace(gang[1], version=6), replace(gang[3], state="stepping", slot=None, live=None)
    with pytest.raises(GangDisagreement) as caught:
        agree(gang, "p")
    assert len(caught.value.problems) >= 2


def test_everyone_on_the_reference_is_no_quorum() -> None:
    with pytest.raises(GangDisagreement, match="rank 0 is in state"):
        agree([replace(a, slot=Slot.REF, state="resident.ref") for a in gang_of_four()], "p")


def test_of_a_thousand_ranks_one_of_each_shard_is_looked_at() -> None:
    """What travels is unpacked where it is looked at, and replicas are known by their summaries."""
    names = [f"layers.{i}.up" for i in range(64)]
    gang = [attestation(r, [piece(n, 4 * (r % 8), 4, 32, r % 8) for n in names], world_size=1024) for r in range(1024)]
    arrived = [pickle.loads(pickle.dumps(a)) for a in gang]
    quorum = agree(arrived, "p")
    assert sum(a.live._pieces is not None for a in arrived) == 8
    assert len(quorum.tensors) == 64
    assert [rank for rank, _ in quorum.holders[names[0]]] == list(range(8))
    assert quorum == agree(gang, "p")


def test_a_fingerprint_arrives_as_it_was_sent() -> None:
    sent = gang_of_four()[1].live
    arrived = pickle.loads(pickle.dumps(sent))
    assert (arrived, hash(arrived), arrived.pieces) == (sent, hash(sent), sent.pieces)  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(arrived)) == sent


def test_replicas_are_known_by_what_they_hold_whatever_its_bytes() -> None:
    gang = gang_of_four()
    assert agree(gang, "p").replicas == (0, 1, 0, 1)
    shards = [(a.worker.rank, a.live) for a in gang if a.live is not None]
    drifted = ShardDigest.of([piece("up", 0, 4, 8, 99), piece("norm", 0, 3, 3, 5)])
    assert replica_numbers([*shards[:2], (2, drifted), shards[3]]) == (0, 1, 0, 1)


@given(st.integers(2, 6), st.integers(0, 5), st.data())
def test_parts_cut_along_one_dimension_cover_a_tensor_or_somebody_is_named(
    cuts: int, dim: int, data: st.DataObject
) -> None:
    full = (12, 30)
    dim %= 2
    edges = [0, *sorted(data.draw(st.lists(st.integers(1, full[dim] - 1), min_size=cuts, max_size=cuts, unique=True)))]
    sizes = [b - a for a, b in zip(edges, [*edges[1:], full[dim]], strict=True)]

    def box(start: int, size: int) -> Region:
        offset, shape = [0, 0], list(full)
        offset[dim], shape[dim] = start, size
        return Region(full, tuple(offset), tuple(shape))

    regions = [box(start, size) for start, size in zip(edges, sizes, strict=True)]
    order = data.draw(st.permutations(range(len(regions))))

    def agreed(held: list[Region]) -> object:
        ranks = [attestation(r, [PieceDigest("up", "bfloat16", box, r)], len(held)) for r, box in enumerate(held)]
        return agree(ranks, "p")

    assert agreed([regions[i] for i in order])
    at = order[0]
    with pytest.raises(GangDisagreement, match="some rank's part is missing"):
        agreed([r for i, r in enumerate(regions) if i != at])
    if edges[at]:
        moved = box(edges[at] - 1, sizes[at])
        with pytest.raises(GangDisagreement, match=r"shards of up overlap|has different bytes"):
            agreed([moved if i == at else r for i, r in enumerate(regions)])


@given(st.permutations(range(4)))
def test_the_order_of_attestations_does_not_matter(order: list[int]) -> None:
    gang = gang_of_four()
    assert agree([gang[i] for i in order], "p") == agree(gang, "p")


# ---- permits ---------------------------------------------------------------------------------------------------


def test_a_permit_is_for_one_purpose_and_ends() -> None:
    permit = mint_permit(agree(gang_of_four(), "p1"), "publish")
    permit.require("publish")
    assert permit.weights == WeightId(2, 7)
    with pytest.raises(PermitVoid, match="is for publish, not for save"):
        permit.require("save")
    permit.revoke()
    with pytest.raises(PermitVoid, match="has ended"):
        permit.require("publish")


def test_a_permit_cannot_be_made_copied_or_sent() -> None:
    quorum = agree(gang_of_four(), "p1")
    with pytest.raises(PermitVoid, match="never constructed"):
        ActorPermit(quorum, "publish", object())
    permit = mint_permit(quorum, "publish")
    for leak in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PermitVoid, match="cannot be copied or sent"):
            leak(permit)


def test_nobody_but_the_machine_mints_permits() -> None:
    users = {
        str(path.relative_to(ROOT))
        for storey in ("state", "workers", "orchestrator")
        for path in (ROOT / storey).rglob("*.py")
        if re.search(r"\b(mint_permit|_MINT)\b", path.read_text())
    }
    assert users == {"state/gang.py", "state/machine.py"}
