"""The part of kustomize that deploy/kuberay uses, so that a manifest can be made and checked without a cluster's tools.

Resources, and JSON patches (RFC 6902: add, replace, remove) aimed at a kind and a name. Any other key is refused, never
passed over. A test compares the result with kubectl's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from state.errors import SlotwiseError

FILE = "kustomization.yaml"
Manifest = dict[str, Any]


class KustomizeError(SlotwiseError):
    """A folder of manifests cannot be built."""


def build(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a kustomization.yaml. Raises `KustomizeError`."""
    path = folder / FILE
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise KustomizeError(f"{path} cannot be read: {error}") from error
    unknown = set(content) - {"apiVersion", "kind", "resources", "patches"}
    if unknown:
        raise KustomizeError(f"{path}: {', '.join(sorted(unknown))} is not supported here; resources and patches are")
    manifests: list[Manifest] = []
    for name in content.get("resources", ()):
        source = folder / name
        manifests += build(source) if source.is_dir() else read(source)
    for patch in content.get("patches", ()):
        _apply(manifests, patch, path)
    return manifests


def read(path: Path) -> list[Manifest]:
    """The manifests of one file. Raises `KustomizeError`."""
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (OSError, yaml.YAMLError) as error:
        raise KustomizeError(f"{path} cannot be read: {error}") from error


def _apply(manifests: Sequence[Manifest], patch: Manifest, path: Path) -> None:
    if set(patch) != {"target", "patch"} or set(patch["target"]) != {"kind", "name"}:
        raise KustomizeError(f"{path}: a patch has a target, of a kind and a name, and the patch itself")
    kind, name = patch["target"]["kind"], patch["target"]["name"]
    aimed_at = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    if not aimed_at:
        raise KustomizeError(f"{path}: a patch is aimed at {kind} {name}, which is not there")
    for manifest in aimed_at:
        for operation in yaml.safe_load(patch["patch"]):
            try:
                _operate(manifest, operation)
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise KustomizeError(
                    f"{path}: cannot {operation['op']} {operation['path']} of {kind} {name}"
                ) from error


def _operate(manifest: Manifest, operation: Manifest) -> None:
    """One operation of RFC 6902. Raises KeyError or IndexError where its place is not."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    match operation["op"], place:
        case "add", list():
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        case "add", dict():
            place[last] = operation["value"]
        case "replace", list():
            place[int(last)] = operation["value"]
        case "replace", dict():
            place[last]  # must be there
            place[last] = operation["value"]
        case "remove", list() | dict():
            del place[int(last) if isinstance(place, list) else last]
        case name, _:
            raise ValueError(name)
