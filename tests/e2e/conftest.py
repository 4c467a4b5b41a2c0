"""One run that others are compared with, continued from, and looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e.runs import Place

BASE = {"loop": {"num_rollout": 4}, "checkpoint": {"save_interval": 1}}


@dataclass(frozen=True)
class Base:
    """Four rollouts, never interrupted, all four checkpoints kept."""

    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Base:
    """Made by whichever of the test processes needs it first, for all of them."""
    own = tmp_path_factory.getbasetemp()
    place = Place((own if worker_id == "master" else own.parent) / "base")
    whole = place.path / "whole"
    with FileLock(place.path.with_suffix(".lock"), timeout=400):
        if not whole.exists():
            place.path.mkdir(exist_ok=True)
            place.train("tiny", BASE)
            whole.touch()
    return Base(place.path / "tiny")
