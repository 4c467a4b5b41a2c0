"""How a leader comes by whole tensors: pieces that other ranks hold reach it point to point in the trainers' group.

Every rank of the gang goes through the plan's buckets in the plan's order, whether it leads, gives or only watches.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from state.digest import dtype_name
from state.digest_records import Region
from state.store import LiveWeights
from workers.weights.buckets import Bucket
from workers.weights.errors import TransportError
from workers.weights.send_plan import SendPlan, Stream
from workers.weights.views import views


class Assembly:
    """This rank's pieces of one transfer, and the ways to and from the other ranks.

    `peers` is the trainers' group, None for the default one. Raises ValueError when the plan is not of `weights`,
    before anyone waits for anyone.
    """

    def __init__(
        self, rank: int, plan: SendPlan, weights: LiveWeights, *, timeout_s: float, peers: ProcessGroup | None
    ) -> None:
        self._rank, self._timeout_s, self._peers = rank, timeout_s, peers
        self._pieces = {(piece.name, piece.region): piece.tensor.detach() for piece in weights.pieces()}
        _check_pieces(rank, plan, self._pieces)

    def fill(self, stream: Stream, bucket: Bucket, buffer: Tensor) -> None:
        """For the leader: whole tensors into `buffer` (uint8, at least as long as the bucket)."""
        for spec, whole in views(bucket, buffer):
            for rank, region in stream.holders[spec.name]:
                part = whole[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]
                if rank == self._rank:
                    part.copy_(self._pieces[spec.name, region])
                elif region.numel:
                    arrived = torch.empty(region.shape, dtype=whole.dtype, device=whole.device)
                    work = dist.irecv(_bytes(arrived), src=rank, group=self._peers)
                    self._finish(work, f"a piece of {spec.name} from trainer rank {rank}")
                    part.copy_(arrived)

    def give(self, stream: Stream, bucket: Bucket) -> None:
        """For everyone else: what this rank holds of the bucket, to its leader."""
        for entry in bucket.entries:
            for rank, region in stream.holders[entry.tensor.name]:
                if rank == self._rank and region.numel:
                    piece = self._pieces[entry.tensor.name, region]
                    work = dist.isend(_bytes(piece), dst=stream.leader, group=self._peers)
                    self._finish(work, f"trainer rank {stream.leader} to take its piece of {entry.tensor.name}")

    def _finish(self, work: dist.Work | None, what: str) -> None:
        if work is None:
            raise TransportError(f"trainer rank {self._rank} is not in the group that pieces travel in")
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"trainer rank {self._rank} waited up to {self._timeout_s:g} s for {what}: {error}"
            ) from error


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor as flat uint8, which every backend moves, whatever the dtype; a copy unless it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def _check_pieces(rank: int, plan: SendPlan, pieces: Mapping[tuple[str, Region], Tensor]) -> None:
    """That this rank holds what the plan says it holds, before anyone waits for it."""
    for stream in plan.streams:
        dtypes = {e.tensor.name: e.tensor.dtype for bucket in stream.buckets for e in bucket.entries}
        for name, holders in stream.holders.items():
            for holder, region in holders:
                if holder != rank:
                    continue
                piece = pieces.get((name, region))
                if piece is None:
                    raise ValueError(f"trainer rank {rank} was to send {region} of {name}, which it does not hold")
                if dtype_name(piece.dtype) != dtypes[name]:
                    raise ValueError(f"trainer rank {rank} holds {name} as {piece.dtype}, not as {dtypes[name]}")
