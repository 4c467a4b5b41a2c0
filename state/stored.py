"""What is read back from disk: parsed and typed in one step, or refused in words.

Each kind of file has one type and one reader; what is not of that type is `Malformed` there, and becomes the error of
that kind of file, with its name. No torch.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

T = TypeVar("T")
_SHOWN = 60
_PROBLEMS = 3

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things, or the number of one."""


class Malformed(ValueError):
    """Content that is not what its kind of file holds. The message says which field, what it is and what it must be."""


class Stored(BaseModel):
    """Base of what a file holds: nothing is converted, and fields that are not known are left out."""

    model_config = ConfigDict(frozen=True, strict=True)


def parse(kind: type[T], content: bytes) -> T:
    """`content`, JSON of a `kind` (a `Stored`, or a dataclass of plain fields). `Malformed` for anything else."""
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_json(content, strict=True)
    except ValidationError as error:
        raise Malformed(_words(error)) from error
    return value


def check(kind: type[T], value: Any) -> str | None:
    """In words, why `value`, which was JSON, is no `kind`; None: it is one."""
    try:
        _adapter(cast(Hashable, kind)).validate_python(value)
    except ValidationError as error:
        return _words(error)
    return None


def parse_object(content: bytes) -> dict[str, Any]:
    """`content`, a JSON object of any fields. `Malformed` for anything else."""
    value = parse_json(content)
    if not isinstance(value, dict):
        raise Malformed(f"holds {shown(value)}, which is no JSON object")
    return value


def parse_json(content: bytes) -> Any:
    """`content`, one JSON value, whose texts can be written again. `Malformed` for anything else."""
    try:
        return from_json(content)
    except ValueError as error:
        raise Malformed(f"is not JSON: {error}") from error


def shown(value: Any) -> str:
    """A value as an error shows it: short, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python turns into text, or nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def _words(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    words = [_of(detail) for detail in details[:_PROBLEMS]]
    more = f"; and {len(details) - _PROBLEMS} more" if len(details) > _PROBLEMS else ""
    return "; ".join(words) + more


def _of(detail: Any) -> str:
    field, message = ".".join(map(str, detail["loc"])), str(detail["msg"])
    match detail["type"]:
        case "json_invalid":
            return f"is not JSON: {message.removeprefix('Invalid JSON: ')}"
        case "missing":
            return f"has no `{field}`"
    said = message[:1].lower() + message[1:]
    return f"`{field}` is {shown(detail['input'])}: {said}" if field else f"holds {shown(detail['input'])}: {said}"
