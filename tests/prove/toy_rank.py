"""A training worker whose every slot is one number: small enough to be put back into any state it was in.

The machine, its store, its table and `agree` are the real ones. The optimizer, the surroundings and the journal are
stand-ins that can fail at every call, and the fingerprint is of the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from state.digest import Piece
from state.digest_records import MASK64, PieceDigest, Region, ShardDigest
from state.errors import InvariantViolation
from state.gang import ActorPermit, GangId
from state.journal import Journal
from state.lifecycle import RESTORABLE
from state.machine import SlotMachine
from state.slots import Slot, Tier, WorkerId
from state.store import Key, SlotStore
from tests.prove.faults import Faults, Injected

NAMES = ("up", "norm", "seen")


class Numbers:
    """LiveWeights: two parameters that share a storage, and a buffer of its own."""

    def __init__(self) -> None:
        flat = torch.zeros(2)
        self._tensors: dict[str, Tensor] = {"up": flat[:1], "norm": flat[1:], "seen": torch.zeros(1)}

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def pieces(self) -> Iterable[Piece]:
        raise AssertionError("the fingerprint is of the numbers")

    def values(self) -> tuple[float, ...] | None:
        """None where the memory is released."""
        if any(t.untyped_storage().nbytes() == 0 for t in self._tensors.values()):
            return None
        return tuple(float(t[0]) for t in self._tensors.values())


@cache
def digest_of(rank: int, world_size: int, up: float, norm: float) -> ShardDigest:
    """`up` is split over the ranks, `norm` is on every one."""
    here = Region((world_size,), (rank,), (1,))
    pieces = (("up", here, up, rank + 1), ("norm", Region.whole((1,)), norm, 1))
    return ShardDigest.of(
        PieceDigest(name, "float32", region, int(value * 1024) * at & MASK64) for name, region, value, at in pieces
    )


class NumberStore(SlotStore):
    """The real store, with the fingerprint of the numbers."""

    def __init__(self, numbers: Numbers, tiers: Mapping[Slot, Tier], faults: Faults, rank: int, world: int) -> None:
        super().__init__(numbers, tiers)
        self._numbers, self._faults, self._place = numbers, faults, (rank, world)

    def digest(self) -> ShardDigest:
        self._faults.point("hash")
        values = self._numbers.values()
        if values is None:
            raise RuntimeError("memory that was released was read")
        return digest_of(*self._place, values[0], values[1])

    def not_finite(self) -> tuple[str, ...]:
        self._faults.point("finite")
        return ()


class NumberMasters:
    """One master number. `outstanding`: the parameters have not been gathered yet."""

    def __init__(self, numbers: Numbers, faults: Faults) -> None:
        self._numbers, self._faults = numbers, faults
        self.master = 0.0
        self.outstanding = False

    def reload(self) -> None:
        values = self._numbers.values()
        assert values is not None
        self.master = values[0]

    def step(self, gather: bool) -> None:
        self.master += 1
        self.outstanding = True
        self._faults.point("optimizer: masters moved")
        if gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        self._faults.point("gather")
        if self.outstanding:
            for tensor in self._numbers.tensors().values():
                tensor.fill_(self.master)
                self._faults.point("optimizer: wrote")
            self.outstanding = False

    def master_mismatches(self) -> list[str]:
        self._faults.point("masters")
        values = self._numbers.values()
        return [] if values is not None and values[0] == self.master else ["up"]


class NumberAmbient:
    """Mode and random state as one number."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.now = 0

    def capture(self) -> object:
        self._faults.point("capture")
        return self.now

    def restore(self, captured: object) -> None:
        self._faults.point("restore")
        self.now = cast(int, captured)


class FailingJournal:
    """Takes every entry, or fails as a full disk does."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        if kind != "refusal":
            self._faults.point("journal")
        return fields


@dataclass
class OpenScope:
    kind: str
    manager: AbstractContextManager[Any]
    before: tuple[Any, ...]
    handle: Any = None
    scribbled: Key | None = None

    def abandon(self) -> None:
        """Close it, whatever that does: the caller puts everything back."""
        with suppress(Injected, InvariantViolation):
            self.manager.__exit__(Injected, Injected("abandoned"), None)


# What a machine, its residency and a store are made of, as far as it changes. The rest stays as it was constructed.
MACHINE_STATE = ("_records", "_spent", "_ready", "_permit")
MACHINE_FIXED = ("_store", "_worker", "_gang", "_ambient", "_primary", "_optimizer")
MACHINE_FIXED += ("_keep_old_actors", "_kept", "_live")
LIVE_STATE = ("poison", "_lent", "_view")
LIVE_FIXED = ("worker", "gang", "primary", "lock", "_journal", "_life")
STORE_STATE = ("_backing", "_at_home", "_pointed")
STORE_FIXED = ("_live", "_tiers", "_homes", "_blocks", "_numbers", "_faults", "_place")


@dataclass
class RankState:
    """All that changes in one rank; tensors are copies."""

    machine: dict[str, Any]
    live: dict[str, Any]
    life: str
    at_home: Key | None
    pointed: Key | None
    backing: dict[Key, list[Tensor]]
    homes: list[Tensor | None]
    where: dict[str, tuple[Key | None, int, int]]
    masters: tuple[float, bool]
    ambient: int


@dataclass
class Rank:
    rank: int
    world_size: int
    tiers: Mapping[Slot, Tier]
    faults: Faults
    numbers: Numbers = field(init=False)
    store: NumberStore = field(init=False)
    masters: NumberMasters = field(init=False)
    ambient: NumberAmbient = field(init=False)
    machine: SlotMachine = field(init=False)
    scope: OpenScope | None = None
    permit: ActorPermit | None = None

    def __post_init__(self) -> None:
        self.numbers = Numbers()
        self.store = NumberStore(self.numbers, self.tiers, self.faults, self.rank, self.world_size)
        self.masters = NumberMasters(self.numbers, self.faults)
        self.ambient = NumberAmbient(self.faults)
        self.machine = SlotMachine(
            self.store,
            worker=WorkerId("run", "actor", self.rank),
            gang=GangId(self.world_size, 1, "c0ffee"),
            journal=cast(Journal, FailingJournal(self.faults)),
            ambient=self.ambient,
            optimizer=self.masters,
            kept=(Slot.REF,),
        )
        assert set(vars(self.machine)) == {*MACHINE_STATE, *MACHINE_FIXED}, "the checker must learn of a new field"
        assert set(vars(self.machine._live)) == {*LIVE_STATE, *LIVE_FIXED}, "the checker must learn of a new field"
        assert set(vars(self.store)) == {*STORE_STATE, *STORE_FIXED}, "the checker must learn of a new field"

    def save(self) -> RankState:
        assert self.scope is None
        store, machine = self.store, self.machine
        known = {id_of(block): (key, i) for key, blocks in store._backing.items() for i, block in enumerate(blocks)}
        known |= {id_of(block.home): (None, i) for i, block in enumerate(store._blocks)}
        return RankState(
            machine={name: _copied(vars(machine)[name]) for name in MACHINE_STATE},
            live={name: _copied(vars(machine._live)[name]) for name in LIVE_STATE},
            life=machine.state,
            at_home=store._at_home,
            pointed=store._pointed,
            backing={key: [b.clone() for b in blocks] for key, blocks in store._backing.items()},
            homes=[None if b.home.untyped_storage().nbytes() == 0 else b.home.clone() for b in store._blocks],
            where={n: (*known[id_of(t)], t.storage_offset()) for n, t in self.numbers.tensors().items()},
            masters=(self.masters.master, self.masters.outstanding),
            ambient=self.ambient.now,
        )

    def restore(self, saved: RankState) -> None:
        store, machine = self.store, self.machine
        for name, value in saved.machine.items():
            setattr(machine, name, _copied(value))
        for name, value in saved.live.items():
            setattr(machine._live, name, _copied(value))
        machine._live._life.state = saved.life
        store._at_home, store._pointed = saved.at_home, saved.pointed
        store._backing = {key: [b.clone() for b in blocks] for key, blocks in saved.backing.items()}
        for block, home in zip(store._blocks, saved.homes, strict=True):
            storage = block.home.untyped_storage()
            storage.resize_(0 if home is None else block.storage_bytes)
            if home is not None:
                block.home.copy_(home)
        for name, tensor in self.numbers.tensors().items():
            key, block, offset = saved.where[name]
            home = store._homes[name]
            if key is None:
                tensor.data = home
            else:
                storage = store._backing[key][block].untyped_storage()
                tensor.data = torch.empty(0).set_(storage, offset, home.shape, home.stride())
        self.masters.master, self.masters.outstanding = saved.masters
        self.ambient.now, self.permit, self.scope = saved.ambient, None, None

    def key(self) -> tuple[Any, ...]:
        """All that may matter for what comes; equal keys are one state. Numbers of transitions are left out."""
        store, machine = self.store, self.machine
        if self.scope is None and self.is_stuck():
            return (machine.state,)
        return (
            machine.state,
            machine._ready,
            machine._live.poison.origin if machine._live.poison else None,
            machine.view().resident,
            tuple(sorted((str(k), record.version, record.digest) for k, (record, _) in machine._records.items())),
            str(store._at_home),
            str(store._pointed),
            tuple(sorted((str(k), *(tuple(b.tolist()) for b in blocks)) for k, blocks in store._backing.items())),
            self.numbers.values() if store._at_home or store._pointed else "unknown",
            tuple(b.home.untyped_storage().nbytes() for b in store._blocks),
            self.masters.master,
            self.masters.outstanding,
            self.ambient.now,
            self._scope_key(),
        )

    def is_stuck(self) -> bool:
        """Whether nothing leads out of here but a new gang: then it does not matter what is here."""
        poison = self.machine._live.poison
        if self.machine.state == "poisoned":
            return poison is None or poison.origin not in RESTORABLE
        return self.machine.state in ("loading", "switching", "stepping", "publishing", "saving")

    def _scope_key(self) -> tuple[Any, ...] | None:
        scope = self.scope
        if scope is None:
            return None
        return (scope.kind, scope.scribbled, scope.before, scope.kind == "step" and scope.handle.wrote)


def id_of(tensor: Tensor) -> int:
    """Which storage it is: that of an empty one has no address of its own."""
    return tensor.untyped_storage()._cdata


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | set) else value
