"""One local Ray cluster for all tests of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import REPO, Ended, Place


@pytest.fixture(scope="session")
def dashboard() -> Iterator[str]:
    """Address of its dashboard."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(REPO)
    script = Path(__file__).with_name("ray_cluster.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        cwd=script.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    yield f"http://{json.loads(process.stdout.readline())['dashboard']}"
    process.stdin.close()
    process.wait(60)


class Jobs(Place):
    """A directory from which runs are submitted."""

    def submit(self, dashboard: str, config: Path, *arguments: str) -> Ended:
        return self.run(
            "submit", config, "--address", dashboard, "--working-dir", self.path, *arguments, timeout_s=240.0
        )


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)
