"""Validates a manifest against a CustomResourceDefinition as the API server would: defaults, structure, CEL rules.

Needs the packages jsonschema and cel-python (`pip install "slotwise[check]"`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import celpy
import yaml
from celpy.adapter import json_to_cel
from celpy.celtypes import BoolType
from jsonschema import Draft202012Validator

from orchestrator.kuberay.kustomize import KustomizeError

Json = Any
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The C loader is five times as fast, and not everywhere."""


def load_crds(path: Path) -> dict[tuple[str, str], Json]:
    """Schemas by (apiVersion, kind), of a folder of files or of one file, such as `kubectl get crd -o yaml` prints."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    found: dict[tuple[str, str], Json] = {}
    for file in files:
        try:
            documents = [d for d in yaml.load_all(file.read_text(), _LOADER) if isinstance(d, dict)]
        except (OSError, yaml.YAMLError) as error:
            raise KustomizeError(f"{file} cannot be read: {error}") from error
        for document in documents:
            items = document.get("items", []) if document.get("kind") == "List" else [document]
            for crd in items:
                if crd.get("kind") == "CustomResourceDefinition":
                    found |= _versions(crd["spec"])
    if not found:
        raise KustomizeError(f"{path} holds no CustomResourceDefinition")
    return found


def _versions(spec: Mapping[str, Any]) -> dict[tuple[str, str], Json]:
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): version["schema"]["openAPIV3Schema"]
        for version in spec["versions"]
        if version.get("served", True)
    }


class Schema:
    """One version of one kind."""

    def __init__(self, structural: Json) -> None:
        self._structural = structural
        self._validator = Draft202012Validator(_json_schema(structural))

    def problems(self, manifest: Json) -> Iterator[str]:
        """`path: what is wrong`, for a manifest that is being created."""
        value = _with_defaults(copy.deepcopy(manifest), self._structural)
        for error in self._validator.iter_errors(value):
            yield f"{_dotted(error.absolute_path)}: {error.message[:300]}"
        yield from _rules(value, self._structural, ())


def _json_schema(schema: Json) -> Json:
    """A structural schema as JSON Schema; a field that it does not name is an error, where the server would drop it."""
    kept = (
        "type",
        "enum",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
        "required",
        "minItems",
        "maxItems",
    )
    result = {key: schema[key] for key in kept if key in schema}
    for key in ("anyOf", "allOf", "oneOf"):
        if key in schema:
            result[key] = [_json_schema(part) for part in schema[key]]
    if schema.get("x-kubernetes-int-or-string"):
        result.setdefault("type", ["integer", "string"])
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    if "properties" in schema:
        result["properties"] = {name: _json_schema(part) for name, part in schema["properties"].items()}
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _json_schema(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = _json_schema(schema["items"])
    return result


def _with_defaults(value: Json, schema: Json) -> Json:
    """Defaults put in, and nulls left out, as the server does before it validates."""
    if isinstance(value, dict):
        for name in [name for name, entry in value.items() if entry is None]:
            del value[name]
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                value[name] = _with_defaults(value[name], part)
        every = schema.get("additionalProperties")
        if isinstance(every, dict):
            return {name: _with_defaults(entry, every) for name, entry in value.items()}
    elif isinstance(value, list) and "items" in schema:
        return [_with_defaults(entry, schema["items"]) for entry in value]
    return value


def _rules(value: Json, schema: Json, path: tuple[Any, ...]) -> Iterator[str]:
    """Keys of lists that are maps, and CEL rules; rules about changes do not concern what is being created."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{_dotted(path)}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        every = schema.get("additionalProperties")
        for name, entry in value.items():
            part = schema.get("properties", {}).get(name) or (every if isinstance(every, dict) else {})
            yield from _rules(entry, part, (*path, name))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen: list[tuple[Any, ...]] = []
        for index, entry in enumerate(value):
            if keys and isinstance(entry, dict):
                key = tuple(entry.get(name) for name in keys)
                if key in seen:
                    yield f"{_dotted((*path, index))}: is there twice, by {', '.join(keys)}"
                seen.append(key)
            yield from _rules(entry, schema.get("items", {}), (*path, index))


def _holds(rule: str, value: Json) -> bool:
    environment = celpy.Environment()
    program = environment.program(environment.compile(rule))
    try:
        return bool(program.evaluate({"self": json_to_cel(value)}) == BoolType(True))
    except celpy.CELEvalError:
        return False


def _dotted(path: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "manifest"
