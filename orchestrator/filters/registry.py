"""Filters by name. A filter says whether a judged group is worth training on; others are named by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.options.imports import UnknownName, did_you_mean, import_function, is_import_path
from workers.batch import Prompt, Sample

FilterFunction = Callable[[Prompt, Sequence[Sample]], bool]
"""`(prompt, samples of its group with their rewards) -> whether to keep the group`."""


def unequal_rewards(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    """Keep groups whose rewards differ: the others have no advantage (dynamic sampling of DAPO, arXiv 2503.14476)."""
    return len({sample.reward for sample in samples if sample.reward is not None}) > 1


FILTERS: Mapping[str, FilterFunction] = {"unequal_rewards": unequal_rewards}


def resolve_filter(name: str) -> FilterFunction:
    """A registered filter, or the function at an import path."""
    if name in FILTERS:
        return FILTERS[name]
    if is_import_path(name):
        return import_function(name)
    raise UnknownName(
        f"unknown filter {name!r}{did_you_mean(name, FILTERS)} (or an import path package.module:function)"
    )
