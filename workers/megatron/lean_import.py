"""Imports megatron-core without two large packages that it imports where they are installed, and a rank never uses.

`wandb`: a rank tracks nothing, and a killed process leaves behind the directories that importing it creates. torch's
compiler: see `compiles`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


def compiles() -> bool:
    """Whether torch compiles in this process what is decorated for it; else it runs as it is written."""
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1"


@contextmanager
def lean_import(*, compiler: bool) -> Iterator[None]:
    """Around the first import of whatever imports Megatron. Afterwards both packages can be used as ever."""
    with ExitStack() as undo:
        if "wandb" not in sys.modules:
            modules: dict[str, Any] = sys.modules
            modules["wandb"] = None  # so importing it is an ImportError
            undo.callback(modules.pop, "wandb", None)
        if not compiler:
            undo.enter_context(patch.object(torch, "compile", _as_written))
        yield


def _as_written(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return function if function is not None else _as_written
