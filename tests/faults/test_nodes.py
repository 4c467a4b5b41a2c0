"""Nodes go away under a run: one that dies costs a restart on another; one that is drained ends it with a save."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.e2e.runs import REPO, Place, journal, lines, marker, until

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head without room, where only the driver and what is beside it runs."""
    for name, value in {"PYTHONPATH": str(REPO), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


def trained(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(lines(file)) if file.exists() else 0


def test_a_node_that_dies_costs_a_restart_on_another(cluster: Cluster, tmp_path: Path) -> None:
    place, run_dir = Place(tmp_path, address=cluster.address), tmp_path / "moved"
    first = cluster.add_node(num_cpus=1)
    config = {"loop": {"num_rollout": 40}, "checkpoint": {"save_interval": 1, "keep": 2}}
    process = place.start("train", place.config("moved", config))
    until(lambda: trained(run_dir) >= 2, "two rollouts", timeout_s=300)
    cluster.add_node(num_cpus=1)

    cluster.remove_node(first, allow_graceful=False)

    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "the gang is built anew (restart 1 of 3)" in output
    (failed,) = journal(run_dir, "driver", "gang_failed")
    assert failed["ranks"]
    assert [entry["step"] for entry in lines(run_dir / "metrics.jsonl")] == list(range(40))
    assert place.run("audit", run_dir).code == 0


def test_a_node_that_is_drained_ends_the_run_with_a_save(cluster: Cluster, tmp_path: Path) -> None:
    place, run_dir = Place(tmp_path, address=cluster.address), tmp_path / "drained"
    node = cluster.add_node(num_cpus=1)
    config = place.config("drained", {"loop": {"num_rollout": 1000}, "checkpoint": {"save_interval": 1000}})
    process = place.start("train", config)
    until(lambda: trained(run_dir) >= 1, "a rollout", timeout_s=300)

    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    where = ["--address", cluster.address, "--node-id", node.node_id, "--deadline-remaining-seconds", "100"]
    ray_command = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray_command, "drain-node", *where, *reason], check=True, timeout=60, capture_output=True)

    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    last = lines(run_dir / "metrics.jsonl")[-1]["step"]
    assert f"node {node.node_id[:12]} is being taken away; saved as iter_{last:07d}" in output
    assert marker(run_dir / "checkpoints", last)["version"] == last + 1
    assert place.run("audit", run_dir).code == 0
    assert not ray.is_initialized()
