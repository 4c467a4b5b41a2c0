"""From a YAML file and `--section.key value` flags to a validated `Config`, or to every problem at once.

Defaults, then the file, then the flags, key by key; pydantic judges the result. A key or a flag counts only in full:
nothing is matched by its beginning. Flags are read by the type of their option:

    --train.lr 1e-5                      number, whole number, text or choice
    --run.name 1e5                       text stays text; `null` is None where None is allowed, `"null"` is text
    --checkpoint.weights_only            true; also `--no-checkpoint.weights_only`, `--checkpoint.weights_only false`
    --rollout.stop_token_ids 1 2         list; also `[1, 2]`
    --train.megatron.attention_dropout 0 key that is passed through; its value is read as YAML
    --rollout.stop=--                    `=` for a value that begins with two dashes
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.config import Config
from orchestrator.options import yaml_values
from orchestrator.options.fields import OPTIONS, Option, owner
from orchestrator.options.problems import ConfigError, Problem

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and where each key that was given came from."""

    config: Config
    origins: Mapping[str, str]

    def located(self, problem: Problem) -> Problem:
        """The problem with the place of its key, where that was given."""
        return problem if problem.where else Problem(problem.key, problem.message, self.origins.get(problem.key, ""))


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was given: where, and whether as text of a flag."""

    path: Keys
    value: Any
    where: str


def load(path: str | Path | None, argv: Sequence[str]) -> Config:
    """The configuration of a file (None: defaults) and flags. Raises `ConfigError` with all problems."""
    return resolve(path, argv).config


def resolve(path: str | Path | None, argv: Sequence[str]) -> Resolved:
    """As `load`, with the origin of each key."""
    problems: list[Problem] = []
    document = _read_file(Path(path)) if path is not None else yaml_values.Document({})
    origins = {".".join(keys): f"{path}:{line}" for keys, line in document.lines.items()}
    for keys, line in document.duplicates:
        problems.append(Problem(".".join(keys), "given twice in this section", f"{path}:{line}"))
    values = _merged(_defaults(Config()), document.value, ())
    for given in _flags(argv, problems):
        origins[".".join(given.path)] = given.where
        _put(values, given.path, given.value)
    try:
        config = Config.model_validate(_as_tuples(values))
    except ValidationError as error:
        problems.extend(_explain(error, origins))
    else:
        problems.extend(Problem(key, what, _origin(key, origins)) for key, what in _unusable(config.model_dump()))
        if not problems:
            return Resolved(config, origins)
    raise ConfigError(problems)


def to_yaml(config: Config) -> str:
    """The configuration in full; `load` of this text gives an equal one."""
    return yaml_values.write(config.model_dump(mode="json"))


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the valid names, or nothing when none is near. Of one name in several
    sections all are named."""
    names, name = list(valid), name.replace("-", "_")
    last = name.rpartition(".")[2]
    begun = [other for other in names if name and other.startswith(name)]
    same = [other for other in names if other.rpartition(".")[2] == last]
    if same and not begun:
        return f"; did you mean {' or '.join(same)}?"
    close = begun[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        ends = {other.rpartition(".")[2]: other for other in reversed(names)}
        close = [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.6)]
    if not close and len(last) > 1:
        close = [other for other in names if other.rpartition(".")[2].startswith(last)][:1]
    return f"; did you mean {close[0]}?" if close else ""


def _read_file(path: Path) -> yaml_values.Document:
    try:
        document = yaml_values.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"is not YAML: {error}")]) from error
    if document.value is None:
        document.value = {}
    if not isinstance(document.value, dict):
        raise ConfigError([Problem(str(path), f"must hold sections such as `train:`, not {_shown(document.value)}")])
    return document


def _defaults(model: BaseModel) -> dict[str, Any]:
    return {
        name: _defaults(value) if isinstance(value, BaseModel) else value
        for name, value in ((name, copy.deepcopy(vars(model)[name])) for name in type(model).model_fields)
    }


def _merged(base: Any, given: Any, path: Keys) -> Any:
    """`given` over `base`; a section that is written but empty changes nothing."""
    option = OPTIONS.get(path)
    if path and (option is None or option.section is None):
        return given
    if given is None and not (option and option.nullable):
        return base
    if not isinstance(given, dict):
        return given
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in given.items():
        result[key] = _merged(result.get(key), value, (*path, key))
    return result


def _put(values: dict[str, Any], path: Keys, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = value


def _as_tuples(values: Any, path: Keys = ()) -> Any:
    option = OPTIONS.get(path)
    if option is not None and option.items is not None and isinstance(values, list):
        return tuple(values)
    if isinstance(values, dict) and (option is None or option.section is not None):
        return {key: _as_tuples(value, (*path, key)) for key, value in values.items()}
    return values


def _flags(argv: Sequence[str], problems: list[Problem]) -> list[_Given]:
    found: list[_Given] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if not token.startswith("--") or token == "--":
            problems.append(Problem(token, "is not a flag; options are given as --section.key value", "command line"))
            continue
        flag, equals, inline = token.partition("=")
        texts = [inline] if equals else []
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            texts.append(argv[position])
            position += 1
        given = _flag(flag, texts, problems)
        if given is not None:
            found.append(given)
    return found


def _flag(flag: str, texts: list[str], problems: list[Problem]) -> _Given | None:
    name = flag.removeprefix("--")
    path = tuple(name.split("."))
    passed_to = owner(path)
    option = OPTIONS.get(path)
    if passed_to is not None:
        if "" in path:
            problems.append(Problem(name, f"names no key of {passed_to.dotted}", flag))
            return None
        return _single(path, texts, flag, problems, _read_yaml)
    if option is None and name.startswith("no-"):
        negated = OPTIONS.get(tuple(name.removeprefix("no-").split(".")))
        if negated is not None and negated.type is bool:
            if texts:
                problems.append(Problem(negated.dotted, f"{flag} takes no value, given {' '.join(texts)!r}", flag))
                return None
            return _Given(negated.path, False, flag)
    if option is None or (option.section is not None and not option.nullable):
        valid = [other.dotted for other in OPTIONS.values() if other.section is None]
        what = "is a section; give one of its keys" if option else "there is no such option"
        problems.append(Problem(name, f"{what}{nearest(name, valid)}", flag))
        return None
    if option.type is bool and not texts:
        return _Given(path, True, flag)
    if option.items is not None and not (len(texts) == 1 and texts[0].startswith("[")) and texts != ["null"]:
        return _Given(path, tuple(_read_text(option.items, text) for text in texts), flag)
    return _single(path, texts, flag, problems, lambda text: _read_option(option, text))


def _single(path: Keys, texts: list[str], flag: str, problems: list[Problem], read: Any) -> _Given | None:
    if len(texts) == 1:
        return _Given(path, read(texts[0]), flag)
    given = f"takes one value, given {len(texts)}: {' '.join(texts)}" if texts else "needs a value"
    problems.append(Problem(".".join(path), given, flag))
    return None


def _read_option(option: Option, text: str) -> Any:
    if text == "null" and option.nullable:
        return None
    if option.section is not None or option.is_mapping or option.items is not None:
        return _read_yaml(text)
    if option.choices:
        return next((choice for choice in option.choices if str(choice) == text), text)
    return _read_text(option.type, text)


def _read_text(kind: Any, text: str) -> Any:
    """The value of a flag's text; text that does not fit is left as it is, for validation to name."""
    if kind is str:
        quoted = len(text) > 1 and text[0] == text[-1] == '"'
        inner = _read_yaml(text) if quoted else text
        return inner if isinstance(inner, str) else text
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind is int:
        try:
            return yaml_values.whole_number(text) if re.fullmatch(r"[-+]?[0-9]+", text) else text
        except yaml_values.YamlError:
            return text
    value = _read_yaml(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _read_yaml(text: str) -> Any:
    try:
        return yaml_values.read_value(text) if text.strip() else text
    except yaml_values.YamlError:
        return text


def _explain(error: ValidationError, origins: Mapping[str, str]) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = tuple(str(part) for part in detail["loc"] if not isinstance(part, int))
        key = ".".join(path)
        where = _origin(key, origins)
        if detail["type"] == "extra_forbidden":
            message = f"there is no such option{_suggestion(path)}"
        else:
            option = OPTIONS[path]
            given = detail["input"]
            message = f"given {_shown(given)}; accepted: {option.accepts()}{_hint(option, given)}"
        problems.setdefault(key, Problem(key, message, where))
    return list(problems.values())


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Where a key, or the innermost section around it that was given, came from."""
    path = key.split(".")
    return next((origins[k] for k in (".".join(path[:n]) for n in range(len(path), 0, -1)) if k in origins), "")


def _suggestion(path: Keys) -> str:
    siblings = [other.dotted for other in OPTIONS.values() if other.path[:-1] == path[:-1]]
    within = difflib.get_close_matches(path[-1], [name.rpartition(".")[2] for name in siblings], n=1, cutoff=0.6)
    if within:
        return f"; did you mean {'.'.join((*path[:-1], within[0]))}?"
    return nearest(".".join(path), siblings) or nearest(".".join(path), [o.dotted for o in OPTIONS.values()])


def _hint(option: Option, given: Any) -> str:
    if option.type is str and given is not None and not isinstance(given, dict | list | tuple):
        return "; put it in quotes to make it text"
    if option.choices and isinstance(given, str):
        close = difflib.get_close_matches(given, [str(choice) for choice in option.choices], n=1)
        return f"; did you mean {close[0]}?" if close else ""
    if (
        isinstance(given, str)
        and option.type in (int, float)
        and isinstance(_read_text(option.type, given), int | float)
    ):
        return "; it is in quotes, which makes it text"
    return ""


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"{str(value).lower()} (true or false)"
        case int() | float():
            return f"{value} (a number)"
        case str():
            return f"{value!r} (text)"
        case dict():
            return "a mapping"
        case _:
            return f"{list(value)!r} (a list)"


def _unusable(value: Any, path: Keys = ()) -> Iterator[tuple[str, str]]:
    """Values that no option takes, whatever its type: numbers that are none, text that cannot be written to a file."""
    key = ".".join(path)
    match value:
        case dict():
            for name, held in value.items():
                yield from _unusable(name, (*path, _printable(name)))
                yield from _unusable(held, (*path, _printable(name)))
        case list() | tuple():
            for held in value:
                yield from _unusable(held, path)
        case float() if value - value != 0:
            yield key, "must be finite"
        case str() if _printable(value) != value or "\0" in value:
            yield key, f"{value!r} holds what cannot be in a file or its name: half a character, or a NUL; leave it out"


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
