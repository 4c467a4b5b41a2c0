"""What ranks do in test_hf_export.py: agree on random weights, and export them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from state.digest import digest_pieces
from state.gang import Attestation, GangId, PermitVoid, Quorum, agree, mint_permit
from state.slots import Slot, WorkerId
from tests.workers.gang_processes import Place
from tests.workers.megatron_jobs import gang
from workers.config import ModelConfig
from workers.megatron import hf_io
from workers.megatron.hf_export import ExportMismatch, export_weights
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout


def quorum_of(weights: GptWeights, place: Place) -> Quorum:
    live = digest_pieces(weights.pieces())
    mine = Attestation(
        WorkerId("run", Slot.ACTOR, place.rank),
        GangId(place.world_size, 1, "config"),
        "resident.actor",
        Slot.ACTOR,
        3,
        live,
        live.summary,
        transition=1,
    )
    everyone: list[Any] = [None] * place.world_size
    dist.all_gather_object(everyone, mine)
    return agree(everyone, "export")


def export(
    place: Place, layout: Layout, models: Mapping[str, ModelConfig], root: Path, file_bytes: int
) -> dict[str, tuple[Any, ...]]:
    """Each model, random from seed 4, as a directory in `root`; returns the digests that were agreed on."""
    agreed = {}
    with gang(place, layout):
        for name, model in models.items():
            weights = GptWeights(build(load_hf_config(model), layout, model, {}, seed=4))
            quorum = quorum_of(weights, place)
            if place.rank == 0:
                (root / name).mkdir(parents=True)
                hf_io.describe(weights.hf_config, model.dtype, root / name, files_from=None)
            dist.barrier()
            write(weights, root / name, quorum, place, "save", file_bytes)
            agreed[name] = quorum.tensors
    return agreed


def write(
    weights: GptWeights, directory: Path, quorum: Quorum, place: Place, purpose: str, file_bytes: int = 1 << 30
) -> None:
    permit = mint_permit(quorum, purpose)  # type: ignore[arg-type]
    export_weights(weights, directory, permit=permit, rank=place.rank, file_bytes=file_bytes, timeout_s=30.0)


def refused(place: Place, model: ModelConfig, directory: Path) -> list[str]:
    """What is said to a permit for something else, and to bytes that nobody swore to."""
    said = []
    with gang(place, Layout(1)):
        weights = GptWeights(build(load_hf_config(model), Layout(1), model, {}, seed=4))
        quorum = quorum_of(weights, place)
        try:
            write(weights, directory, quorum, place, "publish")
        except PermitVoid as error:
            said.append(str(error))
        first = quorum.tensors[0]
        others = (replace(first, value=first.value ^ 1), *quorum.tensors[1:])
        try:
            write(weights, directory, replace(quorum, tensors=others), place, "save")
        except ExportMismatch as error:
            said.append(str(error))
    return said
