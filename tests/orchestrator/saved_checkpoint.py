"""What a run writes beside the weights of a checkpoint, small. `SAMPLE` waits there, written by two versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.resume.fingerprints import fingerprints
from state import saves

CURSOR = {"fingerprint": "f00d", "position": 0, "epoch": 0, "next_group_id": 0, "left_out": 0}
DATA: dict[str, Any] = {"cursor": CURSOR, "waiting": []}
SAMPLE: dict[str, Any] = {
    "group_id": 3, "index": 0, "prompt_ids": [1, 9], "response_ids": [2, 3], "logprobs": [-0.5, -0.1],
    "loss_mask": [1, 1], "versions": [[1, 4], [1, 5]], "spans": [[1, 4, 0, 1], [1, 5, 1, 2]], "seed": 1,
    "finish_reason": "stop", "reward": 1.0,
}  # fmt: skip


def marker(config: Config) -> dict[str, Any]:
    """What a run with `config` says of an actor."""
    return {"digest": "abcd", "dtype": config.model.dtype, "slots": [], "fingerprint": fingerprints(config)}


def saved(root: Path, iteration: int, config: Config, **changes: Any) -> Path:
    """A complete checkpoint of a run with `config`. `changes` to its marker; None: without that field."""
    directory = saves.begin(root, iteration)
    saves.write_data(directory, DATA)
    said = {key: value for key, value in (marker(config) | changes).items() if value is not None}
    saves.commit(root, iteration, said, None)
    return directory
