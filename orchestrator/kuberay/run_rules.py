"""What a run's manifests must have so that it survives its cluster, beyond what Kubernetes and KubeRay demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import yaml

Json = Any

RUNS = "runs"
"""Name of the volume that outlives the cluster."""
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""How long a node that was told to go waits for what runs on it."""


def problems(manifests: Sequence[Json]) -> Iterator[str]:
    """`kind/name: path: what is wrong`, of all manifests of one build together."""
    yield from _references(manifests)
    for job in (manifest for manifest in manifests if manifest["kind"] == "RayJob"):
        yield from (f"RayJob/{job['metadata']['name']}: {problem}" for problem in _job(job["spec"]))


def _job(spec: Json) -> Iterator[str]:
    for key, why in (
        ("backoffLimit", "else one lost node ends the run"),
        ("activeDeadlineSeconds", "else a run that hangs holds its nodes for ever"),
        ("preRunningDeadlineSeconds", "else a run that never gets its nodes waits for ever"),
        ("ttlSecondsAfterFinished", "so that its output can still be read when it has ended"),
    ):
        if not spec.get(key):
            yield f"spec.{key}: is needed, {why}"
    if spec.get("shutdownAfterJobFinishes") is not True:
        yield "spec.shutdownAfterJobFinishes: must be true, else the cluster outlives the run"
    if spec.get("submissionMode") != "HTTPMode":
        yield "spec.submissionMode: must be HTTPMode; a submitter pod's end is not the job's, and may come before"
    cluster = spec.get("rayClusterSpec") or {}
    pods = [("headGroupSpec", cluster["headGroupSpec"]["template"]["spec"])] if cluster else []
    pods += [
        (f"workerGroupSpecs[{i}]", g["template"]["spec"]) for i, g in enumerate(cluster.get("workerGroupSpecs", ()))
    ]
    for place, pod in pods:
        yield from (f"spec.rayClusterSpec.{place}.template.spec.{problem}" for problem in _pod(pod))
    if pods:
        yield from _ends_in_order(spec, pods[0][1], [pod for _, pod in pods[1:]])


def _pod(pod: Json) -> Iterator[str]:
    security, container = pod.get("securityContext") or {}, pod["containers"][0]
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy: must be Never; a restarted head or node knows nothing of the run"
    if security.get("runAsNonRoot") is not True:
        yield "securityContext.runAsNonRoot: must be true"
    if (container.get("securityContext") or {}).get("allowPrivilegeEscalation") is not False:
        yield "containers[0].securityContext.allowPrivilegeEscalation: must be false"
    if "ALL" not in ((container.get("securityContext") or {}).get("capabilities") or {}).get("drop", ()):
        yield "containers[0].securityContext.capabilities.drop: must be [ALL]"
    image = container.get("image", "")
    if ":" not in image.rpartition("/")[2] or image.endswith(":latest"):
        yield f"containers[0].image: {image!r} must be pinned by a tag other than latest, or a digest"
    resources = container.get("resources") or {}
    for kind in ("cpu", "memory"):
        if kind not in resources.get("requests", {}) or kind not in resources.get("limits", {}):
            yield f"containers[0].resources: {kind} must be requested and limited; Ray takes its size from there"
    for variable in container.get("env", ()):
        if variable["name"].endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")) and "value" in variable:
            yield f"containers[0].env: {variable['name']} must come from a secret, not be written here"
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
    for mount in mounts.values():
        if mount not in volumes:
            yield f"containers[0].volumeMounts: there is no volume {mount}"
    shm = (volumes.get(mounts.get("/dev/shm", "")) or {}).get("emptyDir") or {}
    if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
        yield "volumes: /dev/shm needs an emptyDir with medium Memory and a sizeLimit; NCCL and Ray live in it"
    if RUNS not in mounts.values() or "persistentVolumeClaim" not in (volumes.get(RUNS) or {}):
        yield f"volumes: {RUNS} must be mounted from a persistentVolumeClaim, else no run can be continued"


def _ends_in_order(spec: Json, head: Json, workers: Sequence[Json]) -> Iterator[str]:
    """The driver gets its time, then whoever waits for it, then the nodes, then Kubernetes kills."""
    variables = (yaml.safe_load(spec.get("runtimeEnvYAML", "")) or {}).get("env_vars", {})
    stop = variables.get("RAY_JOB_STOP_WAIT_TIME_S")
    if stop is None:
        yield "spec.runtimeEnvYAML: needs env_vars.RAY_JOB_STOP_WAIT_TIME_S; Ray kills a driver after 3 s else"
        return
    driver = [("RAY_JOB_STOP_WAIT_TIME_S", float(stop))]
    hook = ((head["containers"][0].get("lifecycle") or {}).get("preStop") or {}).get("exec", {}).get("command", [])
    if "--wait-s" in hook:
        driver.append(("the head's preStop", float(hook[hook.index("--wait-s") + 1])))
    else:
        yield "spec.rayClusterSpec.headGroupSpec: needs a preStop that ends the job, which KubeRay does not"
    chains = [[*driver, ("terminationGracePeriodSeconds of the head", _grace(head))]]
    for worker in workers:
        drain = [float(v["value"]) for v in worker["containers"][0].get("env", ()) if v["name"] == DRAIN]
        if not drain:
            yield f"spec.rayClusterSpec.workerGroupSpecs: need the variable {DRAIN}, to stay up for the checkpoint"
        nodes = [(DRAIN, seconds) for seconds in drain]
        chains.append([*driver, *nodes, ("terminationGracePeriodSeconds of the workers", _grace(worker))])
    for chain in chains:
        for (earlier, short), (later, long) in pairwise(chain):
            if short >= long:
                yield f"spec: {earlier} ({short:g} s) must be shorter than {later} ({long:g} s)"


def _grace(pod: Json) -> float:
    return float(pod.get("terminationGracePeriodSeconds", 30))


def _references(manifests: Sequence[Json]) -> Iterator[str]:
    """What pods mount, and what is to be scraped, must be there."""
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    templates = [template for job in manifests if job["kind"] == "RayJob" for template in _templates(job)]
    for template in templates:
        for volume in template["spec"].get("volumes", ()):
            for key, kind, name in (
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
                ("configMap", "ConfigMap", "name"),
            ):
                if key in volume and (kind, volume[key][name]) not in there:
                    yield f"RayJob: the volume {volume['name']} is of {kind} {volume[key][name]}, which is not there"
    for monitor in (manifest for manifest in manifests if manifest["kind"] == "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for template in templates:
            named = {port.get("name") for port in template["spec"]["containers"][0].get("ports", ())}
            if not wanted <= template["metadata"].get("labels", {}).items() or not ports <= named:
                yield f"PodMonitor/{monitor['metadata']['name']}: does not find the ports or labels of every pod"


def _templates(job: Json) -> list[Json]:
    cluster = job["spec"].get("rayClusterSpec")
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())] if cluster else []
    return [group["template"] for group in groups]
