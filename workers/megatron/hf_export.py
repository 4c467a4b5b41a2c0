"""The agreed weights of a gang as a Hugging Face directory, on any layout: no rank needs to hold the whole model.

Each tensor is assembled on the lowest rank that holds a part of it, as in a publish, and written by that rank. Which
tensor stands in which file follows from the quorum alone, so every rank knows it without asking.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from state.digest import digest_tensor
from state.errors import InvariantViolation
from state.gang import ActorPermit
from workers.megatron.hf_io import INDEX, SINGLE_FILE
from workers.megatron.hf_layout import GptWeights
from workers.weights.assembly import Assembly
from workers.weights.buckets import Bucket
from workers.weights.send_plan import SendPlan, Stream, plan_send
from workers.weights.views import views


class ExportMismatch(InvariantViolation):
    """What was put together is not what the gang swore to."""


def export_weights(
    weights: GptWeights, directory: Path, *, permit: ActorPermit, rank: int, file_bytes: int, timeout_s: float
) -> None:
    """This rank's files of `directory`, of about `file_bytes` each; rank 0 adds the index. All ranks call it together.

    Every tensor is compared with the quorum's digest before it is written. Raises ExportMismatch, PermitVoid.
    """
    permit.require("save")
    quorum = permit.quorum
    plan = plan_send(quorum.holders, quorum.tensors, file_bytes)
    sworn = {tensor.name: tensor for tensor in quorum.tensors}
    assembly = Assembly(rank, plan, weights, timeout_s=timeout_s, peers=None)
    for stream, bucket, name in _files(plan):
        permit.require("save")
        if stream.leader != rank:
            assembly.give(stream, bucket)
            continue
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
        assembly.fill(stream, bucket, buffer)
        tensors = {spec.name: whole for spec, whole in views(bucket, buffer)}
        for tensor, whole in tensors.items():
            if digest_tensor(tensor, whole) != sworn[tensor]:
                raise ExportMismatch(f"{quorum.publish_id}: {tensor} as put together is not {quorum.slot} as sworn to")
        save_file({t: whole.cpu() for t, whole in tensors.items()}, directory / name, metadata={"format": "pt"})
    if rank == 0:
        _write_index(plan, directory)


def _files(plan: SendPlan) -> list[tuple[Stream, Bucket, str]]:
    parts = [(stream, bucket) for stream in plan.streams for bucket in stream.buckets]
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return [(*part, name) for part, name in zip(parts, names if len(parts) > 1 else [SINGLE_FILE], strict=True)]


def _write_index(plan: SendPlan, directory: Path) -> None:
    files = _files(plan)
    if len(files) == 1:
        return
    weight_map = {entry.tensor.name: name for _, bucket, name in files for entry in bucket.entries}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
