"""A run's configuration put into the manifests: what it asks is what the cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli import main
from orchestrator.kuberay.fill import fill, nodes_for
from orchestrator.kuberay.kustomize import build
from orchestrator.options.load import load
from orchestrator.options.problems import ConfigError
from orchestrator.placement import bundles
from orchestrator.running.run_dir import config_hash
from tests.deploy.manifests import OVERLAYS
from tests.orchestrator.valid_config import with_flags, write

ON_GPUS = ("--run.dir", "/runs/test", "--train.gpus_per_worker", "1", "--rollout.gpus_per_engine", "1")


def job_of(manifests: list[Any]) -> Any:
    (job,) = [manifest for manifest in manifests if manifest["kind"] == "RayJob"]
    return job


def filled(tmp_path: Path, overlay: str, *flags: str, image: str | None = None) -> list[Any]:
    config = with_flags(tmp_path, *flags)
    return fill(build(OVERLAYS / overlay), config, bundles(config), image)


def workers(job: Any) -> tuple[int, str | None]:
    """How many, and the GPUs of each."""
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return group["replicas"], limits.get("nvidia.com/gpu")


@pytest.mark.parametrize(
    ("ranks", "engines", "asked"),
    [(2, 1, (1, "3")), (6, 2, (1, "8")), (8, 1, (2, "8")), (16, 16, (4, "8")), (2, 40, (6, "8"))],
)
def test_nodes_and_gpus_follow_from_ranks_and_engines(
    tmp_path: Path, ranks: int, engines: int, asked: tuple[int, str]
) -> None:
    flags = ("--train.num_workers", str(ranks), "--rollout.num_engines", str(engines))
    assert workers(job_of(filled(tmp_path, "gpu", *ON_GPUS, *flags))) == asked


def test_an_engine_over_several_gpus_is_not_torn_over_nodes() -> None:
    bundles = [{"CPU": 1.0, "GPU": 3.0}] * 4
    assert len(nodes_for(bundles, {"CPU": 64.0, "GPU": 8.0})) == 2
    with pytest.raises(ValueError, match="CPU 1 GPU 9"):
        nodes_for([{"CPU": 1.0, "GPU": 9.0}], {"CPU": 64.0, "GPU": 8.0})


def test_a_run_without_gpus_goes_by_cpus(tmp_path: Path) -> None:
    flags = ("--run.dir", "/runs/test", "--train.num_workers", "4", "--train.cpus_per_worker", "1")
    assert workers(job_of(filled(tmp_path, "dev", *flags))) == (3, None)


def test_the_configuration_goes_along_and_is_named(tmp_path: Path) -> None:
    config = with_flags(tmp_path, *ON_GPUS)
    manifests = fill(build(OVERLAYS / "gpu"), config, bundles(config), None)
    (settings,) = [manifest for manifest in manifests if manifest["kind"] == "ConfigMap"]
    written = tmp_path / "from-the-map.yaml"
    written.write_text(settings["data"]["config.yaml"])
    assert load(written, ()) == config
    job = job_of(manifests)
    assert job["metadata"]["name"] == settings["metadata"]["name"] == "test"
    assert job["spec"]["metadata"] == {
        "run": "test",
        "run_dir": "/runs/test",
        "config_hash": config_hash(config),
    }


def test_the_times_follow_from_the_deadline_of_the_last_save(tmp_path: Path) -> None:
    job = job_of(filled(tmp_path, "gpu", *ON_GPUS, "--checkpoint.stop_deadline_s", "600"))
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "660"}
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "675"
    assert head["terminationGracePeriodSeconds"] == 720


def test_one_image_for_all_pods(tmp_path: Path) -> None:
    cluster = job_of(filled(tmp_path, "gpu", *ON_GPUS, image="mine:1"))["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert {group["template"]["spec"]["containers"][0]["image"] for group in groups} == {"mine:1"}


@pytest.mark.parametrize(
    ("overlay", "flags", "said"),
    [
        ("gpu", ("--run.dir", "/runs/test"), "use --overlay dev"),
        ("dev", ON_GPUS, "use --overlay gpu"),
        ("gpu", (*ON_GPUS, "--rollout.gpus_per_engine", "16"), "an actor asks CPU 1 GPU 16"),
        ("gpu", (*ON_GPUS, "--run.dir", "/home/me"), "/home/me is not in /runs"),
        ("gpu", (*ON_GPUS, "--checkpoint.save", "/tmp/x"), "/tmp/x is not in /runs"),
        ("gpu", (*ON_GPUS, "--run.name", "3-b"), "cannot name a RayJob"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, overlay: str, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        filled(tmp_path, overlay, *flags)


def test_what_is_printed_can_be_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["render", str(write(tmp_path)), "--overlay", "kueue", "--image", "mine:1"]
    assert main([*command, *ON_GPUS]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [manifest["kind"] for manifest in printed] == ["ConfigMap", "PersistentVolumeClaim", "RayJob", "PodMonitor"]
    assert job_of(printed)["spec"]["suspend"] is True
    assert main([*command, "--check", *ON_GPUS]) == 0
    assert "nothing wrong by the rules" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "CONFIG.yaml: is needed"),
        (("CONFIG", "--overlay", "no"), "overlays: dev, gpu, kueue, volcano"),
        (("CONFIG",), "run.dir: defaults to runs/test, which is relative"),
        (("CONFIG", *ON_GPUS, "--train.lrr", "1"), "did you mean train.lr?"),
        (("CONFIG", *ON_GPUS, "--image", "mine:latest"), "must be pinned"),
    ],
)
def test_a_wrong_command_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    path = str(write(tmp_path))
    assert main(["render", *(path if argument == "CONFIG" else argument for argument in arguments)]) == 2
    assert said in capsys.readouterr().err
