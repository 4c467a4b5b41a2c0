"""Everything that can be known to be wrong with the manifests of a run without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.kuberay import operator_rules, run_rules

if TYPE_CHECKING:
    from orchestrator.kuberay.schema import Schema

Schemas = Mapping[tuple[str, str], "Schema"]


def problems(manifests: Sequence[Any], schemas: Schemas | None) -> list[str]:
    """`kind/name: path: what is wrong`. Without `schemas`, of (apiVersion, kind), by the rules alone."""
    found: list[str] = []
    jobs = [manifest for manifest in manifests if manifest["kind"] == "RayJob"]
    for manifest in manifests if schemas is not None else ():
        schema = (schemas or {}).get((manifest["apiVersion"], manifest["kind"]))
        if schema is not None:
            found += [f"{_named(manifest)}: {problem}" for problem in schema.problems(manifest)]
        elif manifest["kind"].startswith("Ray"):
            found.append(
                f"{_named(manifest)}: the custom resources given have no {manifest['apiVersion']} of this kind"
            )
    if found:
        return found  # rules are for manifests of the right shape
    try:
        for job in jobs:
            found += [f"{_named(job)}: {problem}" for problem in operator_rules.problems(job)]
        if not found:
            found += run_rules.problems(manifests)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        found.append(f"a RayJob has not the shape it must have: {type(error).__name__}: {error}")
    return found


def _named(manifest: Any) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"
