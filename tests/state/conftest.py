"""Runs whose journals are damaged on purpose."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run_dir(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged of the module's `sound` run. Its saves are where that run made them."""
    return Path(shutil.copytree(sound, tmp_path / "run"))
