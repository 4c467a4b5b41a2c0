"""A credential in the driver's environment stays there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired

import psutil
import pytest

from tests.e2e.runs import Place, descendants, lines

CANARIES = {"WANDB_API_KEY": "c0ffee" * 6 + "c0de", "HF_TOKEN": "hf_canaryCanaryCanaryCanaryCanary"}
TRACKED = {
    "loop": {"num_rollout": 1},
    "checkpoint": {"save_interval": 1},
    "tracking": {"wandb": {"mode": "offline"}, "tensorboard": True},
}


@pytest.fixture
def ray_files() -> Iterator[Path]:
    """Where Ray writes; the paths of its sockets must be short."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.prove
def test_it_is_in_no_argument_output_or_file_of_a_tracked_run(
    place: Place, ray_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (CANARIES | {"RAY_TMPDIR": str(ray_files)}).items():
        monkeypatch.setenv(name, value)
    process = place.start("train", place.config("tracked", TRACKED))
    arguments: set[str] = set()
    while process.poll() is None:
        for child in (psutil.Process(process.pid), *descendants(process.pid)):
            try:
                arguments.update(child.cmdline())
            except psutil.Error:
                continue
        try:
            process.wait(0.5)
        except TimeoutExpired:
            continue
    output, _ = process.communicate()

    assert process.returncode == 0, output
    run_dir = place.path / "tracked"
    assert len(lines(run_dir / "metrics.jsonl")) == 1
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb")), "W&B wrote its file"
    assert list((run_dir / "tensorboard").glob("events.out.*")), "TensorBoard wrote its file"
    files = [file for root in (place.path, ray_files) for file in root.rglob("*") if file.is_file()]
    assert {file.parts[len(ray_files.parts)] for file in files if file.is_relative_to(ray_files)}, "Ray wrote its logs"
    for canary in CANARIES.values():
        assert canary not in output
        assert not [argument for argument in arguments if canary in argument]
        assert [str(file) for file in files if canary.encode() in file.read_bytes()] == []
