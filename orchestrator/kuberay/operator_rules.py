"""What KubeRay's operator refuses beyond its schemas (validation.go of v1.7), for what is used here: RayJobs with a
cluster of their own. The API server takes such a manifest, and then nothing happens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

Json = Any

MAX_NAME = 47
"""Of a RayJob; names of its cluster and services are made from it."""
MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
TOKENS_SINCE = (2, 52, 0)
"""Ray's version that knows authOptions.mode token."""
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def is_name(text: str) -> bool:
    """Whether it can name a RayJob."""
    return len(text) <= MAX_NAME and _DNS_1035.fullmatch(text) is not None


def problems(job: Json) -> Iterator[str]:
    """`path: what is wrong`, for a RayJob that its schema accepts."""
    if not is_name(job["metadata"]["name"]):
        yield f"metadata.name: must be a DNS label that begins with a letter, of at most {MAX_NAME} characters"
    yield from _job(job["spec"])
    cluster = job["spec"].get("rayClusterSpec")
    if cluster is not None:
        yield from (f"spec.rayClusterSpec.{problem}" for problem in _cluster(cluster))


def _job(spec: Json) -> Iterator[str]:
    mode, selects = spec.get("submissionMode", "K8sJobMode"), bool(spec.get("clusterSelector"))
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if mode not in MODES:
        yield f"spec.submissionMode: {mode!r} is none of {', '.join(MODES)}"
    if spec.get("suspend") and not shuts_down:
        yield "spec.suspend: needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and selects:
        yield "spec.suspend: cannot be used with clusterSelector"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "spec.ttlSecondsAfterFinished: must not be negative"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shuts_down:
        yield "spec.ttlSecondsAfterFinished: needs shutdownAfterJobFinishes: true"
    if shuts_down and (spec.get("deletionStrategy") or {}).get("deletionRules"):
        yield "spec.deletionStrategy.deletionRules: cannot be used with shutdownAfterJobFinishes"
    if not selects and spec.get("rayClusterSpec") is None:
        yield "spec.rayClusterSpec: is needed where there is no clusterSelector"
    if spec.get("backoffLimit", 0) < 0:
        yield "spec.backoffLimit: must not be negative"
    if spec.get("backoffLimit", 0) > 0 and (selects or mode == "InteractiveMode"):
        yield "spec.backoffLimit: cannot be used with clusterSelector or InteractiveMode"
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        yield "spec.activeDeadlineSeconds: must be above 0"
    if mode == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
            if spec.get(key):
                yield f"spec.{key}: cannot be used with SidecarMode"
        head = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {}).get("spec", {})
        if head.get("restartPolicy", "Never") != "Never":
            yield "spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy: must be Never with SidecarMode"
    try:
        environment = yaml.safe_load(spec.get("runtimeEnvYAML", "")) or {}
    except yaml.YAMLError as error:
        yield f"spec.runtimeEnvYAML: is not YAML: {error}"
    else:
        if not isinstance(environment, dict):
            yield "spec.runtimeEnvYAML: must be a mapping"


def _cluster(spec: Json) -> Iterator[str]:
    autoscales, workers = bool(spec.get("enableInTreeAutoscaling")), spec.get("workerGroupSpecs", [])
    groups = [("headGroupSpec", spec["headGroupSpec"])]
    groups += [(f"workerGroupSpecs[{index}]", group) for index, group in enumerate(workers)]
    for place, group in groups:
        yield from (f"{place}.{problem}" for problem in _group(group))
    names = [group["groupName"] for group in workers]
    for index, group in enumerate(workers):
        place = f"workerGroupSpecs[{index}]"
        if names.index(group["groupName"]) != index:
            yield f"{place}.groupName: {group['groupName']} is there twice"
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if least > most:
            yield f"{place}.minReplicas: {least} is above maxReplicas {most}"
        if group.get("suspend"):
            why = "with enableInTreeAutoscaling" if autoscales else "without the feature gate RayJobDeletionPolicy"
            yield f"{place}.suspend: cannot be used {why}"
    for variable in spec["headGroupSpec"]["template"]["spec"]["containers"][0].get("env", ()):
        name = variable["name"]
        if name == "RAY_enable_autoscaler_v2" and not autoscales and variable.get("value") in ("1", "true"):
            yield f"headGroupSpec: the variable {name} needs enableInTreeAutoscaling: true"
        if name == "RAY_REDIS_ADDRESS" and spec.get("gcsFaultToleranceOptions") is None:
            yield f"headGroupSpec: the variable {name} needs gcsFaultToleranceOptions"
    if (spec.get("authOptions") or {}).get("mode") == "token":
        version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", spec.get("rayVersion", ""))
        if version is None or tuple(int(part) for part in version.groups()) < TOKENS_SINCE:
            needed = ".".join(map(str, TOKENS_SINCE))
            yield f"authOptions.mode: token needs rayVersion to be given and to be {needed} or newer"


def _group(group: Json) -> Iterator[str]:
    if not group["template"].get("spec", {}).get("containers"):
        yield "template.spec.containers: needs at least one"
    given = group.get("rayStartParams", {})
    if group.get("resources") and any(given.get(key) for key in _RESOURCES):
        yield "resources: give them here or in rayStartParams, not in both"
    if "labels" in given:
        yield "rayStartParams.labels: is not supported; use labels"
    for key, value in group.get("labels", {}).items():
        if not _LABEL.fullmatch(value) or not key or not _LABEL.fullmatch(key.rpartition("/")[2]):
            yield f"labels: {key}: {value} is not a label"
