"""Functions that users name in a configuration: `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from state.errors import SlotwiseError


class UnknownName(SlotwiseError):
    """A name that is neither registered nor an import path that leads to a function."""


def is_import_path(name: str) -> bool:
    """Whether `name` has the shape `package.module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_function(path: str) -> Callable[..., Any]:
    """The function at `package.module:function`; `UnknownName` says which half does not exist."""
    if not is_import_path(path):
        raise UnknownName(f"{path!r} is not an import path; expected package.module:function")
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownName(f"{path!r}: no module named {error.name!r}") from error
    found = vars(module).get(name)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(f"{path!r}: module {module_name!r} has no function {name!r}{did_you_mean(name, names)}")
    return found


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A suffix for an error message: the nearest valid name, else all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
