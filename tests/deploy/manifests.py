"""Manifests to break in one place at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.kuberay.kustomize import build

REPO = Path(__file__).parents[2]
OVERLAYS = REPO / "deploy" / "kuberay" / "overlays"
NAMES = ("dev", "gpu", "kueue", "volcano")
HEAD = "spec.rayClusterSpec.headGroupSpec"
WORKERS = "spec.rayClusterSpec.workerGroupSpecs.0"
GONE = object()
"""As the value of a mutant: the place is removed."""


def changed(overlay: str, place: str, value: Any, kind: str = "RayJob") -> list[Any]:
    """The manifests of an overlay with `value` at a place such as `spec.workerGroupSpecs.0.replicas`."""
    manifests = build(OVERLAYS / overlay)
    (target,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    *parents, last = [int(part) if part.isdigit() else part.replace("~", ".") for part in place.split(".")]
    for part in parents:
        target = target[part]
    if value is GONE:
        del target[last]
    elif isinstance(target, list) and last == len(target):
        target.append(value)
    else:
        target[last] = value
    return manifests
