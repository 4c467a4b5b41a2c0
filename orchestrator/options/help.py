"""`slotwise train --help`, from the configuration's models."""

from __future__ import annotations

import textwrap
from typing import Any

from pydantic import BaseModel

from orchestrator.config import Config
from orchestrator.options.fields import OPTIONS, Option

_USAGE = """\
usage: slotwise train CONFIG.yaml [--section.key value ...] [--dry-run] [--json]

  --dry-run   check, print the configuration and where the run would start, and end
  --json      print what --dry-run prints as JSON

Each option can stand in the file or be given as a flag; flags win. Names are never abbreviated.
  --section.key value       text, number or choice; null is none where that is allowed, "null" is the text
  --section.flag            true; false is --no-section.flag or --section.flag false
  --section.list a b        a list, also as [a, b]
  --train.megatron.key 1    a key that is passed through; its value is read as YAML
  --section.key=--x         a value that begins with two dashes
"""


def train_help() -> str:
    """Usage, then every option with what it accepts, its default and its text."""
    parts = [_USAGE]
    for section in Config.model_fields:
        model = OPTIONS[(section,)].section
        assert model is not None
        about = "" if model.__doc__ is None else f": {' '.join(model.__doc__.split())}"
        parts.append(f"{section}{about}")
        parts += [_entry(option) for option in OPTIONS.values() if option.path[0] == section and option.section is None]
        parts.append("")
    return "\n".join(parts)


def _entry(option: Option) -> str:
    head = f"  --{option.dotted}{'.KEY' if option.is_mapping else ''}  ({option.accepts()}; default {_default(option)})"
    return f"{head}\n{textwrap.indent(textwrap.fill(option.doc, 108), '      ')}" if option.doc else head


def _default(option: Option) -> str:
    value: Any = OPTIONS[option.path[:1]].default
    for key in option.path[1:]:
        # A section that is off by default has its own defaults once it is on.
        value = vars(value)[key] if isinstance(value, BaseModel) else option.default
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case "":
            return '""'
        case tuple() | list():
            return "[" + ", ".join(map(str, value)) + "]"
        case _:
            return str(value)
