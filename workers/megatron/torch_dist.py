"""Megatron's `torch_dist` writer, without processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes the same files through torch's own synchronous writer.

    Megatron's writer starts a manager process per rank that stays (2.5 to 10 s at the first save, some 300 MB) and
    forks for every file, for the sake of saving asynchronously.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        dcp.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )
