"""Checkpoint directories as runs of ours, and Megatron itself, leave them; without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.resume.fingerprints import fingerprints
from state import checkpoints, saves

CURSOR = {"fingerprint": "f", "position": 0, "epoch": 0, "next_group_id": 0, "left_out": 0}
DATA: dict[str, Any] = {"cursor": CURSOR, "waiting": []}


def saved(root: Path, config: Config, role: str, *iterations: int, critic: str | None = "critic") -> None:
    """Checkpoints of `role`; `critic`: the digest of the critic, which an actor was saved with."""
    beside = {"critic": critic} if role == "actor" else {"actor": str(root).removesuffix("-critic")}
    for iteration in iterations:
        directory = saves.begin(root, iteration)
        if role == "actor":
            saves.write_data(directory, DATA)
        marker: dict[str, Any] = beside | {"role": role, "digest": critic if role == "critic" else role, "slots": []}
        marker |= {"dtype": config.model.dtype, "fingerprint": fingerprints(config)}
        saves.commit(root, iteration, marker, None)


def of_megatron(root: Path, iteration: int) -> None:
    directory = checkpoints.iteration_dir(root, iteration)
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text("{}")
    (root / checkpoints.TRACKER).write_text(str(iteration))
