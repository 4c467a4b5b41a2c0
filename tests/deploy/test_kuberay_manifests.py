"""The manifests are what KubeRay's custom resources and operator accept, and what a run needs; nothing else passes."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli import main
from orchestrator.kuberay import checking, operator_rules
from orchestrator.kuberay.checking import Schemas
from orchestrator.kuberay.kustomize import KustomizeError, build
from orchestrator.kuberay.schema import Schema, load_crds
from tests.deploy.manifests import GONE, HEAD, NAMES, OVERLAYS, REPO, WORKERS, changed

CRDS = REPO.parent / "shared" / "data" / "kuberay"
with_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"KubeRay's CustomResourceDefinitions are not in {CRDS}")
CONTAINER = "template.spec.containers.0"


@pytest.fixture(scope="session")
def schemas() -> Schemas:
    return {kind: Schema(structural) for kind, structural in load_crds(CRDS).items()}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_is_built_as_kubectl_builds_it(name: str) -> None:
    command = ["kubectl", "kustomize", str(OVERLAYS / name)]
    theirs = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert by_kind(build(OVERLAYS / name)) == by_kind(list(yaml.safe_load_all(theirs)))


def by_kind(manifests: list[Any]) -> dict[tuple[str, str], Any]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


@pytest.mark.parametrize("name", NAMES)
def test_every_overlay_is_right_by_the_rules(name: str) -> None:
    assert checking.problems(build(OVERLAYS / name), None) == []


@with_crds
@pytest.mark.parametrize("name", NAMES)
def test_every_overlay_is_right_by_the_schemas(name: str, schemas: Schemas) -> None:
    assert checking.problems(build(OVERLAYS / name), schemas) == []


NOT_BY_SCHEMA: dict[str, tuple[str, Any, str]] = {
    "a misspelt field": ("spec.backOffLimit", 3, "backOffLimit"),
    "a misspelt field of a pod": (f"{WORKERS}.template.spec.tolerationz", [], "tolerationz"),
    "a misspelt field of a container": (f"{HEAD}.{CONTAINER}.volumeMount", [], "volumeMount"),
    "a number as text": ("spec.backoffLimit", "3", "backoffLimit"),
    "a start parameter that is no text": (f"{HEAD}.rayStartParams.num-cpus", 0, "num-cpus"),
    "a variable that is no text": (f"{HEAD}.{CONTAINER}.env.0.value", 0, "value"),
    "a quantity that is none": (f"{WORKERS}.{CONTAINER}.resources.limits.memory", "5Gb", "memory"),
    "a metadata value that is no text": ("spec.metadata.rollouts", 3, "rollouts"),
    "an unknown authentication": ("spec.rayClusterSpec.authOptions.mode", "password", "mode"),
    "a deadline below its minimum": ("spec.preRunningDeadlineSeconds", 0, "preRunningDeadlineSeconds"),
    "a group without a name": (f"{WORKERS}.groupName", GONE, "groupName"),
    "a group without a pod": (f"{WORKERS}.template", GONE, "template"),
    "a container without a name": (f"{WORKERS}.{CONTAINER}.name", GONE, "name"),
    "a port that is there twice": (f"{HEAD}.{CONTAINER}.ports.0.containerPort", 8265, "twice"),
    "a list where a mapping is": (f"{WORKERS}.{CONTAINER}.resources", [], "resources"),
    "a strategy without its other half": (
        "spec.deletionStrategy",
        {"onSuccess": {"policy": "DeleteCluster"}},
        "requires either BOTH",
    ),
    "a manager that is neither": ("spec.managedBy", "me", "managedBy"),
}


@with_crds
@pytest.mark.parametrize(("place", "value", "said"), NOT_BY_SCHEMA.values(), ids=NOT_BY_SCHEMA.keys())
def test_what_the_server_would_refuse_or_drop_is_refused(schemas: Schemas, place: str, value: Any, said: str) -> None:
    found = checking.problems(changed("gpu", place, value), schemas)
    assert [problem for problem in found if said in problem], found


@with_crds
def test_nulls_and_left_out_defaults_are_no_problem(schemas: Schemas) -> None:
    assert checking.problems(changed("gpu", "spec.jobId", None), schemas) == []
    assert checking.problems(changed("gpu", f"{WORKERS}.maxReplicas", GONE), schemas) == []


NOT_BY_OPERATOR: dict[str, tuple[str, Any, str]] = {
    "a long name": ("metadata.name", "a" * 48, "metadata.name"),
    "a name with capitals": ("metadata.name", "Run", "metadata.name"),
    "a name that begins with a digit": ("metadata.name", "3b", "metadata.name"),
    "a time to live without a shutdown": ("spec.shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished: needs"),
    "suspended without a shutdown": ("spec.shutdownAfterJobFinishes", False, "suspend: needs"),
    "a mode that there is not": ("spec.submissionMode", "HttpMode", "is none of"),
    "retries in the interactive mode": ("spec.submissionMode", "InteractiveMode", "backoffLimit: cannot"),
    "retries on someone's cluster": ("spec.clusterSelector", {"ray.io/cluster": "x"}, "backoffLimit: cannot"),
    "negative retries": ("spec.backoffLimit", -1, "must not be negative"),
    "no time at all": ("spec.activeDeadlineSeconds", 0, "activeDeadlineSeconds"),
    "rules for deletion and a shutdown": (
        "spec.deletionStrategy",
        {"deletionRules": [{"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED", "ttlSeconds": 1}}]},
        "deletionRules: cannot",
    ),
    "no cluster": ("spec.rayClusterSpec", GONE, "rayClusterSpec: is needed"),
    "a runtime environment that is no YAML": ("spec.runtimeEnvYAML", "a: [", "is not YAML"),
    "a runtime environment that is a list": ("spec.runtimeEnvYAML", "- a", "must be a mapping"),
    "fewer at most than at least": (f"{WORKERS}.minReplicas", 2, "above maxReplicas"),
    "resources said twice": (f"{HEAD}.resources", {"CPU": "1"}, "not in both"),
    "labels as a start parameter": (f"{HEAD}.rayStartParams.labels", "a=b", "use labels"),
    "a label that is none": (f"{WORKERS}.labels", {"zone": "a b"}, "is not a label"),
    "a suspended group": (f"{WORKERS}.suspend", True, "RayJobDeletionPolicy"),
    "tokens on an old Ray": ("spec.rayClusterSpec.rayVersion", "2.51.0", "2.52.0 or newer"),
    "tokens on a Ray unknown": ("spec.rayClusterSpec.rayVersion", GONE, "rayVersion to be given"),
    "no container": (f"{WORKERS}.template.spec.containers", [], "needs at least one"),
    "a new autoscaler that is off": (
        f"{HEAD}.{CONTAINER}.env.1",
        {"name": "RAY_enable_autoscaler_v2", "value": "1"},
        "enableInTreeAutoscaling",
    ),
}


@pytest.mark.parametrize(("place", "value", "said"), NOT_BY_OPERATOR.values(), ids=NOT_BY_OPERATOR.keys())
def test_what_the_operator_would_not_start_is_refused(place: str, value: Any, said: str) -> None:
    found = checking.problems(changed("kueue", place, value), None)
    assert [problem for problem in found if said in problem], found


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("spec.submitterConfig", {"backoffLimit": 1}, "submitterConfig: cannot be used with SidecarMode"),
        ("spec.submitterPodTemplate", {"spec": {}}, "submitterPodTemplate: cannot be used with SidecarMode"),
        (f"{HEAD}.template.spec.restartPolicy", "Always", "restartPolicy: must be Never with SidecarMode"),
    ],
)
def test_a_sidecar_submits_alone(place: str, value: Any, said: str) -> None:
    (job,) = [manifest for manifest in changed("dev", place, value) if manifest["kind"] == "RayJob"]
    job["spec"]["submissionMode"] = "SidecarMode"
    assert any(said in problem for problem in operator_rules.problems(job))


NOT_FOR_A_RUN: dict[str, tuple[str, Any, str]] = {
    "no retries": ("spec.backoffLimit", GONE, "one lost node ends the run"),
    "no deadline": ("spec.activeDeadlineSeconds", GONE, "holds its nodes for ever"),
    "no limit of waiting": ("spec.preRunningDeadlineSeconds", GONE, "waits for ever"),
    "no time to read the output": ("spec.ttlSecondsAfterFinished", 0, "ttlSecondsAfterFinished: is needed"),
    "a submitter pod": ("spec.submissionMode", "K8sJobMode", "must be HTTPMode"),
    "a head that restarts": (f"{HEAD}.template.spec.restartPolicy", "Always", "restartPolicy: must be Never"),
    "root": (f"{WORKERS}.template.spec.securityContext.runAsNonRoot", False, "runAsNonRoot"),
    "more privileges": (f"{HEAD}.{CONTAINER}.securityContext.allowPrivilegeEscalation", GONE, "allowPrivilege"),
    "all capabilities": (f"{HEAD}.{CONTAINER}.securityContext.capabilities.drop", [], "capabilities.drop"),
    "the latest image": (f"{HEAD}.{CONTAINER}.image", "registry:5000/slotwise", "must be pinned"),
    "no limit of memory": (f"{WORKERS}.{CONTAINER}.resources.limits.memory", GONE, "memory must be"),
    "a key in the manifest": (
        f"{HEAD}.{CONTAINER}.env.1",
        {"name": "WANDB_API_KEY", "value": "x"},
        "must come from a secret",
    ),
    "shared memory of 64 MiB": (f"{WORKERS}.{CONTAINER}.volumeMounts.2", GONE, "/dev/shm needs"),
    "shared memory on disk": (f"{WORKERS}.template.spec.volumes.2.emptyDir.medium", GONE, "/dev/shm needs"),
    "runs that end with the pod": (f"{HEAD}.template.spec.volumes.0", {"name": "runs", "emptyDir": {}}, "continued"),
    "another claim": (
        f"{HEAD}.template.spec.volumes.0.persistentVolumeClaim.claimName",
        "x",
        "PersistentVolumeClaim x, which is not there",
    ),
    "another configuration": (f"{HEAD}.template.spec.volumes.1.configMap.name", "x", "ConfigMap x, which is not"),
    "a driver killed after 3 s": ("spec.runtimeEnvYAML", "{}", "RAY_JOB_STOP_WAIT_TIME_S"),
    "no hook before the head ends": (f"{HEAD}.{CONTAINER}.lifecycle", GONE, "preStop"),
    "a hook too short for the driver": (f"{HEAD}.{CONTAINER}.lifecycle.preStop.exec.command.4", "30", "shorter than"),
    "nodes that end before the driver": (f"{WORKERS}.{CONTAINER}.env.1.value", "30", "shorter than RAY_GRACEFUL"),
    "nodes that do not wait": (f"{WORKERS}.{CONTAINER}.env.1", GONE, "need the variable"),
    "the default 30 s until killed": (f"{WORKERS}.template.spec.terminationGracePeriodSeconds", GONE, "(30 s)"),
    "a head killed early": (f"{HEAD}.template.spec.terminationGracePeriodSeconds", 60, "of the head (60 s)"),
    "pods that are not scraped": (f"{HEAD}.template.metadata.labels", {}, "PodMonitor/slotwise"),
}


@pytest.mark.parametrize(("place", "value", "said"), NOT_FOR_A_RUN.values(), ids=NOT_FOR_A_RUN.keys())
def test_what_would_not_survive_its_cluster_is_refused(place: str, value: Any, said: str) -> None:
    found = checking.problems(changed("gpu", place, value), None)
    assert [problem for problem in found if said in problem], found


@with_crds
def test_the_check_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--check", "--crds", str(CRDS)]) == 0
    assert capsys.readouterr().out == "dev, gpu, kueue, volcano: nothing wrong\n"


@with_crds
def test_custom_resources_can_be_given_as_kubectl_prints_them(tmp_path: Path) -> None:
    crd = (CRDS / "ray.io_rayjobs.yaml").read_text().removeprefix("---\n")
    printed = tmp_path / "crds.yaml"
    printed.write_text(f"apiVersion: v1\nkind: List\nitems:\n-\n{textwrap.indent(crd, '  ')}")
    assert load_crds(printed)[("ray.io/v1", "RayJob")] == load_crds(CRDS)[("ray.io/v1", "RayJob")]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), ("kind: ConfigMap\n", "holds no CustomResource"), ("a: [", "read")]
)
def test_something_else_given_as_custom_resources_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "crds.yaml").write_text(content)
    assert main(["render", "--check", "--crds", str(tmp_path / "crds.yaml")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("namePrefix: a-\n", "namePrefix is not supported"),
        ("resources: [absent.yaml]\n", "cannot be read"),
        ("patches: [{target: {kind: RayJob, name: x}, patch: '[]'}]\n", "RayJob x, which is not there"),
        ("patches: [{path: p.yaml}]\n", "a patch has a target"),
        (
            "resources: [a.yaml]\n"
            "patches: [{target: {kind: A, name: a}, patch: '[{op: replace, path: /no, value: 1}]'}]\n",
            "cannot replace /no of A a",
        ),
    ],
)
def test_what_of_kustomize_is_not_known_here_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text("kind: A\nmetadata: {name: a}\n")
    (tmp_path / "kustomization.yaml").write_text(content)
    with pytest.raises(KustomizeError, match=said):
        build(tmp_path)
