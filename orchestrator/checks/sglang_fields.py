"""Which options an SGLang server takes, read from its sources without importing them (that takes many seconds)."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

_PROBE = "import importlib.util as u; s = u.find_spec('sglang'); print(*(s.submodule_search_locations if s else ()))"
_LIMIT_S = 20.0


class NoSglang(Exception):
    """The interpreter cannot start a server; the message says why."""


@cache
def fields(python: str, pythonpath: str | None) -> Mapping[str, str]:
    """Option -> annotation (`int | None`), of the SGLang that `python` has. Raises `NoSglang`."""
    package = _package(python, pythonpath)
    found: dict[str, str] = {}
    for file in (package / "srt" / "server_args.py", *sorted((package / "srt" / "arg_groups" / "fields").glob("*.py"))):
        if file.is_file():
            found |= _annotations(file)
    if "model_path" not in found:
        raise NoSglang(f"no options of a server were found in {package}: another layout than those that are known")
    return MappingProxyType(found)


def says_who_wrote(python: str, pythonpath: str | None) -> bool:
    """Whether its servers say which weights wrote which tokens of a response that waited for an update. Raises
    `NoSglang`."""
    return (_package(python, pythonpath) / "srt" / "utils" / "weight_versions.py").is_file()


@cache
def _package(python: str, pythonpath: str | None) -> Path:
    environment = os.environ | ({} if pythonpath is None else {"PYTHONPATH": pythonpath})
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except OSError as error:
        raise NoSglang(f"{python} cannot be run: {error.strerror}") from error
    except subprocess.SubprocessError as error:
        raise NoSglang(f"{python} cannot be asked for SGLang: {error}") from error
    if not probe.stdout.strip():
        raise NoSglang(f"{python} has no SGLang; give the interpreter of an environment that has it")
    return Path(probe.stdout.strip())


def _annotations(file: Path) -> Iterator[tuple[str, str]]:
    """Public annotated fields of every class of a file; of `A[type, ...]`, which carries help, the type."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                name = item.target.id
                if not name.startswith("_"):
                    yield name, ast.unparse(_bare(item.annotation))


def _bare(annotation: ast.expr) -> ast.expr:
    match annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, *_])):
            return kind
    return annotation
