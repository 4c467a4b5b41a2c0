"""What a store does with the memory of a GPU: what is released is free for other processes, and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from state.digest import Piece
from state.digest_records import Region
from state.slots import Slot, Tier
from state.store import Key, SlotStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: it frees a GPU's memory")

ACTOR = Key(Slot.ACTOR)
ROWS, COLUMNS = 1 << 14, 1 << 12
NBYTES = 3 * ROWS * COLUMNS * 2


class TwoInOneBuffer:
    def __init__(self) -> None:
        flat = torch.randn(3 * ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
        self.up, self.down = flat[:ROWS], flat[ROWS:]

    def tensors(self) -> Mapping[str, Tensor]:
        return {"up": self.up, "down": self.down}

    def pieces(self) -> Iterator[Piece]:
        for name, tensor in self.tensors().items():
            yield Piece(name, Region.whole(tensor.shape), tensor)


def free() -> int:
    """Bytes that any process could have."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def filled() -> tuple[TwoInOneBuffer, SlotStore]:
    live = TwoInOneBuffer()
    store = SlotStore(live, {Slot.ACTOR: Tier.COPY})
    store.begin_fill(ACTOR, ACTOR)
    store.end_fill(ACTOR, ACTOR)
    return live, store


def test_what_is_released_is_free_for_others_and_comes_back_as_it_was() -> None:
    live, store = filled()
    before = store.digest()
    torch.cuda.empty_cache()  # of what others left
    awake = free()
    for _ in range(2):
        store.release(ACTOR)
        assert free() - awake > 0.98 * NBYTES
        store.reclaim()
        live.up.zero_()
        store.bring(ACTOR, ACTOR)
        assert store.digest() == before
        assert live.down.data_ptr() == live.up.data_ptr() + live.up.nbytes
    assert abs(free() - awake) < 0.02 * NBYTES


def test_a_copy_that_differs_in_one_byte_far_behind_releases_nothing() -> None:
    live, store = filled()
    store.keep(ACTOR)
    live.down[-1, -1] += 1
    awake = free()
    with pytest.raises(Exception, match="nothing was released"):
        store.release(ACTOR)
    assert free() - awake < 0.02 * NBYTES
