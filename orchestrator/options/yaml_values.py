"""YAML as people mean it: the scalars of YAML 1.2, the line of every key, duplicates found.

PyYAML reads YAML 1.1, where `no` and `on` are booleans, `1e-5` is text, `1:30` is 90 and `2024-01-01` a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str, ...]

_SCALARS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
)


_MOST_DEPTH, _MOST_VALUES = 64, 20_000
"""Of one document, with its aliases written out: more is a mistake, or meant to hurt."""
_PATTERNS = {tag: pattern for tag, pattern, _ in _SCALARS}
_TEXT = "tag:yaml.org,2002:str"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return whole_number(self.construct_scalar(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else, and escapes what is not printable.

    (PyYAML writes U+0085 and its like as they are, and reads them back as line breaks.)
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class YamlError(ValueError):
    """Text that is not YAML; the message ends with the line."""


def whole_number(text: str) -> int:
    """`YamlError` for one that does not fit 64 bits: nothing here counts so far."""
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise YamlError(f"{text[:20]}{'...' if len(text) > 20 else ''} is a number of more than 64 bits")
    return number


@dataclass
class Document:
    """A parsed mapping, and where its keys stand."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    values: int = 0
    duplicates: list[tuple[Path, int]] = field(default_factory=list)


def read(text: str) -> Document:
    """Parse one document. `YamlError` when it is not YAML."""
    document = Document(None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.value = _construct(loader, node, (), document, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{error.problem or 'not YAML'} (line {line})") from error
    except RecursionError as error:
        raise YamlError(f"it is nested more than {_MOST_DEPTH} deep") from error
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error).splitlines()[0]) from error
    return document


def read_value(text: str) -> Any:
    """One value as it would stand in a file: `1e-5`, `true`, `null`, `[a, b]`, `"1e5"`. `YamlError` when it is none."""
    return read(text).value


def write(value: Any) -> str:
    """YAML that `read` turns back into the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def _construct(loader: _Loader, node: yaml.Node, path: Path, document: Document, above: tuple[yaml.Node, ...]) -> Any:
    line = node.start_mark.line + 1
    document.values += 1
    if any(node is other for other in above):
        raise YamlError(f"an alias contains itself (line {line})")
    if len(above) > _MOST_DEPTH:
        raise YamlError(f"it is nested more than {_MOST_DEPTH} deep (line {line})")
    if document.values > _MOST_VALUES:
        raise YamlError(f"it has more than {_MOST_VALUES} values, counting every use of an alias (line {line})")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node)
    if node.tag not in _COLLECTIONS:
        raise YamlError(f"the tag {node.tag} is not known (line {line})")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, path, document, (*above, node)) for item in node.value]
    assert isinstance(node, yaml.MappingNode)
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            document.duplicates.append(((*path, key), key_node.start_mark.line + 1))
        seen.add(key)
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        # A key is its text: `on: 1` and `3: x` are keys `on` and `3`.
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlError(f"a key must be text (line {key_node.start_mark.line + 1})")
        key = str(key_node.value)
        document.lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _construct(loader, value_node, (*path, key), document, (*above, node))
    return result


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Text, a number, true or false, or null; a tag that is written out must fit what it stands before."""
    line = node.start_mark.line + 1
    if node.tag != _TEXT and node.tag not in _PATTERNS:
        raise YamlError(f"the tag {node.tag} is not known (line {line})")
    if node.tag != _TEXT and not _PATTERNS[node.tag].match(node.value):
        raise YamlError(f"{node.value!r} is no {node.tag.rpartition(':')[2]}, as its tag says (line {line})")
    try:
        return loader.construct_object(node, deep=True)
    except YamlError as error:
        raise YamlError(f"{error} (line {line})") from error
