"""Megatron's `torch_dist` format, written without processes of its own: at once, or later from a private copy.

Megatron's writer starts a manager process per rank that stays (2.5 to 10 s at the first save, some 300 MB) and forks
for every file, for the sake of saving asynchronously. Here every collective of a save comes before `save` returns, so
that what is left to do later, on another thread, disturbs nothing that the gang does meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class WriteNow(TorchDistSaveShardedStrategy):
    """Writes what it is given before it returns."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        dcp.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=self._writer(checkpoint_dir),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )

    def _writer(self, directory: Path | str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)


class CopyNow(WriteNow):
    """Copies what it is given before it returns, and leaves it to the caller to write the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[PrivateCopy] = []
        """One for each save, in order: the same on every rank."""

    def _writer(self, directory: Path | str) -> dcp.FileSystemWriter:
        copy = PrivateCopy(directory, single_file_per_rank=True, thread_count=1)
        self.copies.append(copy)
        return copy


class PrivateCopy(dcp.FileSystemWriter):
    """What this rank is to write of one directory, in memory of its own, on the CPU.

    `dcp.save` fills it. Afterwards `write` on every rank and then `complete` on rank 0 leave the files of `WriteNow`.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by `dcp.save`, which may write here; the bytes are copied instead."""
        self._plan, self._held = plan, _Held({item.index: _own(planner.resolve_data(item)) for item in plan.items})
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by `dcp.save` on rank 0, with an index of nothing written."""
        self._metadata = metadata

    @property
    def nbytes(self) -> int:
        """Of the tensors that are still to be written."""
        return sum(held.nbytes for held in self._held.data.values() if isinstance(held, Tensor))

    def write(self) -> list[WriteResult]:
        """Write this rank's file and let go of the copy. No other rank is waited for; on any thread."""
        written = super().write_data(self._plan, self._held).wait()
        self._held = _Held({})
        return written

    def complete(self, results: Sequence[list[WriteResult]]) -> None:
        """On rank 0: write the index, from what `write` returned on every rank."""
        super().finish(self._metadata, list(results))


class _Held(dcp.DefaultSavePlanner):
    """Hands out copies that were made before."""

    def __init__(self, data: dict[MetadataIndex, Any]) -> None:
        super().__init__()
        self.data = data

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.data[write_item.index]


def _own(value: Any) -> Any:
    """Objects come serialised already."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
