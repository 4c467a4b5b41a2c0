"""What the configuration's models say about an option: its type, what it accepts, its default, its text."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.config import Config

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """One field of the configuration tree. `type` is without None; `nullable` says whether None is allowed."""

    path: Path
    type: Any
    nullable: bool
    default: Any
    doc: str
    bounds: tuple[str, ...]

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def section(self) -> type[BaseModel] | None:
        """The model, where this option is a section of further options."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, BaseModel) else None

    @property
    def is_mapping(self) -> bool:
        """Whether it holds keys that are passed through to something else."""
        return get_origin(self.type) is dict

    @property
    def items(self) -> Any:
        """Type of the items of a list option, else None."""
        return get_args(self.type)[0] if get_origin(self.type) is tuple else None

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def accepts(self) -> str:
        """What the option accepts, in words."""
        words = _type_words(self)
        if self.bounds:
            words = f"{words} {' and '.join(self.bounds)}"
        return f"{words}, or null" if self.nullable else words


def _options() -> dict[Path, Option]:
    return {option.path: option for option in _walk(Config, ())}


def _walk(model: type[BaseModel], path: Path) -> Iterator[Option]:
    for name, info in model.model_fields.items():
        option = _option((*path, name), info)
        yield option
        if option.section is not None:
            yield from _walk(option.section, option.path)


def _option(path: Path, info: FieldInfo) -> Option:
    annotation, nullable = info.annotation, False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        assert len(members) == 1, f"{path}: only `X | None` is used as a union"
        annotation, nullable = members[0], True
    doc = " ".join((info.description or "").split())
    return Option(path, annotation, nullable, info.get_default(call_default_factory=True), doc, _bounds(info))


def _bounds(info: FieldInfo) -> tuple[str, ...]:
    words = []
    for bound in info.metadata:
        match bound:
            case Ge(ge=value):
                words.append(f"of at least {value}")
            case Gt(gt=value):
                words.append(f"above {value}")
            case Le(le=value):
                words.append(f"of at most {value}")
            case Lt(lt=value):
                words.append(f"below {value}")
    return tuple(words)


def _type_words(option: Option) -> str:
    if option.choices:
        return " or ".join(f"`{choice}`" for choice in option.choices)
    if option.section is not None:
        return f"a section with keys {', '.join(option.section.model_fields)}"
    if option.is_mapping:
        return "a mapping"
    if option.items is not None:
        return f"a list of {'whole numbers' if option.items is int else 'texts'}"
    names: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names[option.type]


OPTIONS: Mapping[Path, Option] = types.MappingProxyType(_options())


def owner(path: Path) -> Option | None:
    """The pass-through option that `path` leads into, if any: `train.megatron` for `train.megatron.num_layers`."""
    for length in range(1, len(path)):
        option = OPTIONS.get(path[:length])
        if option is not None and option.is_mapping:
            return option
    return None
