"""Functions that users name in a configuration: `package.module:function`."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
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


def missing(path: str, search: Sequence[str]) -> str | None:
    """What `package.module:function` lacks of leading to a function, with modules looked for in `search`; None when it
    leads to one, or when only importing could tell. Runs nothing of the user's."""
    module, _, name = path.partition(":")
    places: Sequence[str] = search
    origin = None
    for part in module.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None:
            return f"there is no module {module!r} in the working directory or on PYTHONPATH"
        origin, places = found.origin, found.submodule_search_locations or ()
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        names = _defined(ast.parse(Path(origin).read_bytes()))
    except SyntaxError as error:
        return f"{origin}, line {error.lineno}: {error.msg}"
    if names is None or name in names:
        return None
    return f"{origin} has no {name!r}{did_you_mean(name, names)}"


def _defined(module: ast.Module) -> set[str] | None:
    """Names that a module binds at its top level; None where that cannot be read off."""
    names: set[str] = set()
    for statement in module.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(statement.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
            case ast.Assign():
                names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    return None if "*" in names else names


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A suffix for an error message: the nearest valid name, else all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
