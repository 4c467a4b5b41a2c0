"""One run that others are compared with, continued from, and looked at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import Place

BASE = {"loop": {"num_rollout": 4}, "checkpoint": {"save_interval": 1}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("alone")


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
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    place = Place(tmp_path_factory.mktemp("base"))
    place.train("tiny", BASE)
    return Base(place.path / "tiny")
