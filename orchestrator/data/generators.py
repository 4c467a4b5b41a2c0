"""Prompts made by a function of a seed instead of read from a file.

A generator is a pure function `(seed, index) -> Row`: row `index` of an endless set. Being random access, it
needs no state to be continued from a cursor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.options.imports import UnknownName, did_you_mean, import_function, is_import_path


@dataclass(frozen=True, slots=True)
class Row:
    """One item of a data source before tokenising. `prompt` is text or a list of chat messages."""

    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Generator = Callable[[int, int], Row]


def largest_digit(seed: int, index: int) -> Row:
    """Three digits; the answer is the largest of them, and then nothing more."""
    digits = random.Random(f"largest_digit/{seed}/{index}").choices("0123456789", k=3)
    return Row(prompt=f"{' '.join(digits)} =", label=max(digits))


GENERATORS: Mapping[str, Generator] = {"largest_digit": largest_digit}


def resolve_generator(name: str) -> Generator:
    """A registered generator, or the function at an import path."""
    if name in GENERATORS:
        return GENERATORS[name]
    if is_import_path(name):
        return import_function(name)
    raise UnknownName(
        f"unknown generator {name!r}{did_you_mean(name, GENERATORS)} (or an import path package.module:function)"
    )
