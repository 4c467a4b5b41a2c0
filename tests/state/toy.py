"""A training worker small enough to see through: a model whose every weight can be named, masters, a store, a machine.

The model has what real ones have: parameters that share one flat buffer with padding around them, a parameter of its
own, and a persistent buffer that belongs to no named tensor. `up` is split by rows over the ranks, the rest is
replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from state.ambient import TorchAmbient
from state.digest import Piece
from state.digest_records import Region
from state.gang import GangId, Quorum, agree
from state.journal import Journal
from state.machine import SlotMachine
from state.slots import Provenance, Slot, Tier, WorkerId
from state.store import SlotStore

ROWS, COLUMNS, PADDING = 4, 6, 8
AUXILIARY = (Slot.REF, Slot.TEACHER, Slot.OLD_ACTOR)


class ToyModel(nn.Module):
    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.rank, self.rows = rank, ROWS // world_size
        up, norm = self.rows * COLUMNS, COLUMNS
        self.flat = torch.zeros(PADDING + up + norm + PADDING, dtype=torch.bfloat16)
        self.up = nn.Parameter(self.flat[PADDING : PADDING + up].view(self.rows, COLUMNS))
        self.norm = nn.Parameter(self.flat[PADDING + up : PADDING + up + norm])
        self.head = nn.Parameter(torch.zeros(COLUMNS, 3, dtype=torch.bfloat16).t())  # a strided one
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(x) * self.norm
        return (hidden @ self.up.t()).float().sum() + (hidden @ self.head.t()).float().sum() + self.seen.sum()


class ToyWeights:
    """LiveWeights over a ToyModel."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model

    def tensors(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def pieces(self) -> Iterable[Piece]:
        model = self.model
        rows = Region((ROWS, COLUMNS), (model.rank * model.rows, 0), (model.rows, COLUMNS))
        yield Piece("up.weight", rows, model.up.data)
        yield Piece("norm.weight", Region.whole((COLUMNS,)), model.norm.data)
        yield Piece("head.weight", Region.whole((3, COLUMNS)), model.head.data)


class ToyMasters:
    """fp32 masters and an optimizer that adds `amount` to every weight."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.masters: dict[str, Tensor] = {}
        self.gathers = 0
        self.outstanding: Callable[[], None] | None = None
        self.reload()

    def reload(self) -> None:
        self.masters = {name: p.data.float().clone() for name, p in self.model.named_parameters()}

    def step(self, amount: float) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name] += amount
            parameter.data.copy_(self.masters[name])

    def finish_gather(self) -> None:
        self.gathers += 1
        if self.outstanding is not None:
            self.outstanding()
            self.outstanding = None

    def master_mismatches(self) -> list[str]:
        live = dict(self.model.named_parameters())
        return [n for n, master in self.masters.items() if not torch.equal(master.to(torch.bfloat16), live[n].data)]


def fill(model: ToyModel, value: float) -> None:
    """The loader of a slot in which every weight, and the buffer, is `value`."""
    with torch.no_grad():
        for tensor in ToyWeights(model).tensors().values():
            tensor.fill_(value)


def bytes_of(model: ToyModel) -> dict[str, bytes]:
    """Every parameter and buffer, bit for bit."""
    tensors = ToyWeights(model).tensors()
    return {n: bytes(t.detach().contiguous().view(torch.uint8).flatten().tolist()) for n, t in tensors.items()}


def values_of(model: ToyModel) -> set[float]:
    return {float(x) for t in ToyWeights(model).tensors().values() for x in t.detach().float().flatten()}


@dataclass
class ToyWorker:
    model: ToyModel
    weights: ToyWeights
    masters: ToyMasters
    store: SlotStore
    machine: SlotMachine
    journal: Journal

    def load(self, slot: Slot, value: float, version: int = 0) -> None:
        self.machine.load(slot, lambda: fill(self.model, value), Provenance.random(int(value)), version=version)
        if slot is Slot.ACTOR:
            self.masters.reload()

    def entries(self, kind: str = "transition") -> list[dict[str, object]]:
        return [entry for entry in self.journal.recent() if entry["kind"] == kind]

    def triggers(self) -> list[object]:
        return [entry["trigger"] for entry in self.entries()]

    def quorum(self, publish_id: str = "p1") -> Quorum:
        """For a gang of one."""
        return agree([self.machine.attest()], publish_id)


def cold_worker(
    directory: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    incarnation: int = 1,
    tier: Tier = Tier.COPY,
    tiers: Mapping[Slot, Tier] | None = None,
    primary: Slot = Slot.ACTOR,
    keep_old_actors: int = 1,
    config_hash: str = "c0ffee",
    kept: tuple[Slot, ...] = (),
    split: int | None = None,
) -> ToyWorker:
    """`split`: over how many ranks the model is split; the others are replicas. Unset: over all."""
    shards = split or world_size
    model = ToyModel(rank % shards, shards)
    weights, masters = ToyWeights(model), ToyMasters(model)
    store = SlotStore(weights, tiers or {primary: Tier.COPY} | dict.fromkeys(AUXILIARY, tier))
    worker = WorkerId("run", str(primary), rank)
    journal = Journal(directory / "journal" / f"{primary}-{rank}.jsonl", f"{primary}/{rank}")
    machine = SlotMachine(
        store,
        worker=worker,
        gang=GangId(world_size, incarnation, config_hash),
        journal=journal,
        ambient=TorchAmbient(model),
        primary=primary,
        optimizer=masters,
        keep_old_actors=keep_old_actors,
        kept=kept,
    )
    return ToyWorker(model, weights, masters, store, machine, journal)


def ready_worker(directory: Path, **options: object) -> ToyWorker:
    """Actor filled with 1, ref with 2, teacher with 3; ready."""
    worker = cold_worker(directory, **options)  # type: ignore[arg-type]
    worker.load(Slot.ACTOR, 1)
    worker.load(Slot.REF, 2)
    worker.load(Slot.TEACHER, 3)
    worker.machine.ready()
    return worker
