"""A run's configuration put into the manifests of an overlay."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from orchestrator.config import Config
from orchestrator.jobs.submission import stop_wait_s
from orchestrator.kuberay import operator_rules
from orchestrator.kuberay.run_rules import DRAIN, RUNS
from orchestrator.options.problems import ConfigError, Problem
from orchestrator.resume import resuming
from orchestrator.running.run_dir import config_hash, config_text

Json = Any
GPU = "nvidia.com/gpu"
HOOK_S, NODES_S, KILL_S = 15, 20, 60
"""How much longer than the driver: who asked it to end, its nodes, Kubernetes."""


def fill(
    manifests: Sequence[Json], config: Config, bundles: Sequence[dict[str, float]], image: str | None
) -> list[Json]:
    """The manifests of one run. `bundles` is what each of its actors reserves. Raises `ConfigError`."""
    filled = copy.deepcopy(list(manifests))
    name = _name(config.run.name)
    (job,) = [m for m in filled if m["kind"] == "RayJob"]
    (settings,) = [m for m in filled if m["kind"] == "ConfigMap"]
    old, settings["metadata"]["name"] = settings["metadata"]["name"], name
    settings["data"] = {"config.yaml": config_text(config)}
    job["metadata"]["name"] = name
    spec = job["spec"]
    head, workers = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    spec["metadata"] = {
        "run": config.run.name,
        "run_dir": str(resuming.run_dir(config)),
        "config_hash": config_hash(config),
    }
    for pod in (group["template"]["spec"] for group in (head, *workers)):
        if image is not None:
            pod["containers"][0]["image"] = image
        for volume in pod["volumes"]:
            if volume.get("configMap", {}).get("name") == old:
                volume["configMap"]["name"] = name
    _times(spec, head["template"]["spec"], [group["template"]["spec"] for group in workers], stop_wait_s(config))
    problems = [*_outside_the_volume(config, head["template"]["spec"]["containers"][0])]
    if not problems:
        problems += _size(workers, bundles)
    if problems:
        raise ConfigError(problems)
    return filled


def nodes_for(bundles: Sequence[dict[str, float]], node: dict[str, float]) -> list[dict[str, float]]:
    """What is used of each node when bundles are put on the first that has room, large ones first.

    Raises `ValueError` naming a bundle that no node can hold.
    """
    used: list[dict[str, float]] = []
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0.0), b.get("CPU", 0.0)), reverse=True):
        if any(amount > node.get(kind, 0.0) for kind, amount in bundle.items()):
            raise ValueError(_words(bundle))
        for there in used:
            if all(there.get(kind, 0.0) + amount <= node[kind] + 1e-9 for kind, amount in bundle.items()):
                break
        else:
            there = dict.fromkeys(node, 0.0)
            used.append(there)
        for kind, amount in bundle.items():
            there[kind] += amount
    return used


def _size(groups: Sequence[Json], bundles: Sequence[dict[str, float]]) -> Iterator[Problem]:
    """As many nodes as the run needs, with as many of their GPUs."""
    (group,) = groups
    resources = group["template"]["spec"]["containers"][0]["resources"]
    node = {"CPU": _cores(resources["limits"]["cpu"]), "GPU": float(resources["limits"].get(GPU, 0))}
    asks_gpus = any(bundle.get("GPU") for bundle in bundles)
    if node["GPU"] and not asks_gpus:
        yield Problem(
            "train.gpus_per_worker", "the run uses no GPU, but the overlay's nodes have them; use --overlay dev"
        )
        return
    try:
        used = nodes_for(bundles, node)
    except ValueError as bundle:
        key = "train.gpus_per_worker" if asks_gpus else "train.cpus_per_worker"
        hint = "; use --overlay gpu" if asks_gpus and not node["GPU"] else ""
        yield Problem(key, f"an actor asks {bundle}, and a node of the overlay has {_words(node)}{hint}")
        return
    group["replicas"] = group["minReplicas"] = group["maxReplicas"] = len(used)
    if asks_gpus:
        gpus = str(math.ceil(max(there["GPU"] for there in used) - 1e-9))
        resources["limits"][GPU] = resources["requests"][GPU] = gpus


def _times(spec: Json, head: Json, workers: Sequence[Json], wait_s: int) -> None:
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] = str(wait_s)
    spec["runtimeEnvYAML"] = yaml.safe_dump(environment, sort_keys=False)
    command = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    command[command.index("--wait-s") + 1] = str(wait_s + HOOK_S)
    for worker in workers:
        for variable in worker["containers"][0]["env"]:
            if variable["name"] == DRAIN:
                variable["value"] = str(wait_s + NODES_S)
    for pod in (head, *workers):
        pod["terminationGracePeriodSeconds"] = wait_s + KILL_S


def _name(run: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not operator_rules.is_name(name):
        most = operator_rules.MAX_NAME
        why = f"{run!r} cannot name a RayJob: begin with a letter, and use at most {most} letters, digits and `-`"
        raise ConfigError([Problem("run.name", why)])
    return name


def _outside_the_volume(config: Config, container: Json) -> Iterator[Problem]:
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == RUNS]
    written = {"run.dir": config.run.dir, "checkpoint.save": config.checkpoint.save, "critic.save": config.critic.save}
    for key, path in written.items():
        if path is not None and not PurePosixPath(path).is_relative_to(mount):
            yield Problem(key, f"{path} is not in {mount}, where the claim is mounted that outlives the pods")


def _cores(quantity: str | int) -> float:
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _words(amounts: dict[str, float]) -> str:
    return " ".join(f"{kind} {amount:g}" for kind, amount in sorted(amounts.items()))
