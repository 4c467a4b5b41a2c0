"""How bytes of slots move: tiers, padding, buffers, and what an error part way leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from state.errors import InvariantViolation
from state.slots import Slot, Tier
from state.store import Key, NotHeld, SlotStore
from tests.state.toy import ToyModel, ToyWeights, bytes_of, fill, values_of

ACTOR, REF, TEACHER = Key(Slot.ACTOR), Key(Slot.REF), Key(Slot.TEACHER)
TIERS = [Tier.COPY, Tier.DEVICE]


def filled(tier: Tier, order: tuple[Key, ...] = (ACTOR, REF, TEACHER)) -> tuple[ToyModel, SlotStore]:
    model = ToyModel()
    tiers = {Slot.ACTOR: Tier.COPY, Slot.REF: tier, Slot.TEACHER: tier, Slot.OLD_ACTOR: tier}
    store = SlotStore(ToyWeights(model), tiers)
    for key in order:
        store.begin_fill(key, ACTOR)
        fill(model, 1 + (ACTOR, REF, TEACHER).index(key))
        store.end_fill(key, ACTOR)
    return model, store


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("order", [(ACTOR, REF, TEACHER), (REF, ACTOR, TEACHER), (TEACHER, REF, ACTOR)])
def test_each_slot_comes_back_as_it_was_filled_whatever_the_order(tier: Tier, order: tuple[Key, ...]) -> None:
    model, store = filled(tier, order)
    for key, value in [(ACTOR, 1), (REF, 2), (ACTOR, 1), (TEACHER, 3), (REF, 2), (ACTOR, 1)]:
        store.bring(key, ACTOR)
        assert values_of(model) == {value}


def test_one_block_per_storage() -> None:
    model, store = filled(Tier.COPY)
    blocks = {frozenset(block.names) for block in store._blocks}
    assert blocks == {frozenset({"up", "norm"}), frozenset({"head"}), frozenset({"seen"})}
    assert all(block.home.numel() < 2 * model.flat.numel() for block in store._blocks)


def test_in_the_device_tier_the_actors_bytes_never_move() -> None:
    model, store = filled(Tier.DEVICE)
    store.bring(ACTOR, ACTOR)
    home = model.flat.clone()
    assert store.bring(REF, ACTOR) is False
    assert torch.equal(model.flat, home)
    assert values_of(model) == {2}
    assert model.up.data_ptr() != model.flat.data_ptr() + 16
    assert store.bring(ACTOR, ACTOR) is False
    assert model.up.data_ptr() == model.flat.data_ptr() + 16
    assert model.head.stride() == (1, 3)


def test_the_parameters_stay_the_same_objects() -> None:
    model, store = filled(Tier.DEVICE)
    before = {name: id(p) for name, p in ToyWeights(model).tensors().items()}
    store.bring(REF, ACTOR)
    assert {name: id(p) for name, p in ToyWeights(model).tensors().items()} == before


@pytest.mark.parametrize("tier", TIERS)
def test_a_loader_that_fills_no_buffers_leaves_those_the_model_had(tier: Tier) -> None:
    model, store = filled(tier, (ACTOR,))
    store.begin_fill(REF, ACTOR)
    for parameter in model.parameters():
        parameter.data.fill_(2)
    store.end_fill(REF, ACTOR)
    assert model.seen.tolist() == [1, 1, 1]


@pytest.mark.parametrize("tier", TIERS)
def test_a_primary_filled_again_is_not_restored_from_its_former_copy(tier: Tier) -> None:
    model, store = filled(tier)
    store.begin_fill(ACTOR, ACTOR)
    fill(model, 9)
    store.end_fill(ACTOR, ACTOR)
    store.bring(REF, ACTOR)
    store.bring(ACTOR, ACTOR)
    assert values_of(model) == {9}


def test_a_snapshot_is_a_copy_and_moves_nothing() -> None:
    for tier in TIERS:
        model, store = filled(tier)
        store.bring(ACTOR, ACTOR)
        old = Key(Slot.OLD_ACTOR, 5)
        store.snapshot(ACTOR, old)
        fill(model, 8)
        store.forget(ACTOR)
        store.bring(old, ACTOR)
        assert values_of(model) == {1}
        store.bring(ACTOR, ACTOR)
        assert values_of(model) == {8}


def test_what_is_not_at_home_is_not_copied_from_there() -> None:
    _, store = filled(Tier.COPY)  # the teacher is live
    with pytest.raises(NotHeld, match="holds teacher, not actor"):
        store.snapshot(ACTOR, Key(Slot.OLD_ACTOR, 1))
    with pytest.raises(NotHeld, match="holds teacher, not actor"):
        store.keep(ACTOR)
    with pytest.raises(NotHeld, match="no slot critic; it has actor, ref, teacher, old_actor"):
        store.tier(Slot.CRITIC)
    with pytest.raises(NotHeld, match=r"no bytes of old_actor@3 .* held: actor, ref, teacher"):
        store.bring(Key(Slot.OLD_ACTOR, 3), ACTOR)


def test_a_copy_that_breaks_off_leaves_nobody_at_home_and_the_actor_restorable() -> None:
    model, store = filled(Tier.COPY)
    store.bring(ACTOR, ACTOR)
    store._backing[REF][1] = torch.zeros(3, dtype=torch.uint8)  # the second copy raises
    with pytest.raises(RuntimeError, match="size"):
        store.bring(REF, ACTOR)
    assert not store.is_at_home(ACTOR)
    assert not store.is_at_home(REF)
    assert len(values_of(model)) > 1
    assert store.bring(ACTOR, ACTOR) is True
    assert values_of(model) == {1}


def test_pointers_that_break_off_half_way_are_all_pointed_home_again() -> None:
    model, store = filled(Tier.DEVICE)
    store.bring(ACTOR, ACTOR)
    store._backing[REF].pop()  # the last block has nowhere to point at
    with pytest.raises(ValueError, match="shorter"):
        store.bring(REF, ACTOR)
    assert values_of(model) == {1, 2}
    store.bring(ACTOR, ACTOR)
    assert values_of(model) == {1}


def test_releasing_frees_the_home_and_reclaiming_gives_back_all_of_it() -> None:
    model, store = filled(Tier.COPY)
    store.bring(ACTOR, ACTOR)
    size = model.flat.untyped_storage().nbytes()
    before = bytes_of(model)
    store.release(ACTOR)
    assert model.flat.untyped_storage().nbytes() == 0
    store.reclaim()
    assert model.flat.untyped_storage().nbytes() == size  # padding behind the last parameter too: others view it
    store.bring(ACTOR, ACTOR)
    assert bytes_of(model) == before
    store.reclaim()
    assert bytes_of(model) == before


def test_what_is_released_is_given_back_to_the_device_after_it_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would keep it for itself, where an engine on the same GPU cannot have it."""
    model, store = filled(Tier.COPY)
    store.bring(ACTOR, ACTOR)
    sizes: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: sizes.append(model.flat.untyped_storage().nbytes()))
    store.release(ACTOR)
    assert sizes == [0]


@pytest.mark.parametrize("at_once", [5, 1 << 26])
def test_nothing_is_released_whose_copy_differs(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state.store._COMPARED_AT_ONCE", at_once)
    model, store = filled(Tier.COPY)
    store.bring(ACTOR, ACTOR)
    model.norm.data[0] = 5
    with pytest.raises(InvariantViolation, match="nothing was released"):
        store.release(ACTOR)
    assert store.is_at_home(ACTOR)
    assert model.norm[0] == 5


class Mixed:
    """Two dtypes in one storage, the first tensor at an offset that is no multiple of the other's element."""

    def __init__(self) -> None:
        raw = torch.zeros(64, dtype=torch.uint8)
        self.half = raw[2:6].view(torch.bfloat16)
        self.full = raw[8:24].view(torch.float32)

    def tensors(self) -> Mapping[str, Tensor]:
        return {"half": self.half, "full": self.full}

    def pieces(self) -> list[object]:
        return []


def test_dtypes_may_share_a_storage() -> None:
    """A copy taken of the home is pointed at, so that every dtype must find its own bytes in it."""
    mixed = Mixed()
    store = SlotStore(mixed, {Slot.ACTOR: Tier.COPY, Slot.REF: Tier.DEVICE})  # type: ignore[arg-type]
    for key, value in ((ACTOR, 1), (REF, 2)):
        store.begin_fill(key, ACTOR)
        for tensor in mixed.tensors().values():
            tensor.fill_(value)
        store.end_fill(key, ACTOR)
    store.bring(ACTOR, ACTOR)
    assert (mixed.half.tolist(), mixed.full.tolist()) == ([1, 1], [1, 1, 1, 1])
    store.bring(REF, ACTOR)
    assert (mixed.half.tolist(), mixed.full.tolist()) == ([2, 2], [2, 2, 2, 2])
    store.bring(ACTOR, ACTOR)
    store.snapshot(ACTOR, REF)
    store.bring(REF, ACTOR)
    assert (mixed.half.tolist(), mixed.full.tolist()) == ([1, 1], [1, 1, 1, 1])
