"""What the commands share: how they read their arguments, and how they print."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.options.problems import ConfigError, Problem


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a problem of the configuration."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem(self.prog, message)])


def parser(command: str, about: str) -> Parser:
    return Parser(prog=f"slotwise {command}", description=about, allow_abbrev=False)


def version() -> str:
    """Of this installation, or of the checkout that runs without one."""
    try:
        return metadata.version("slotwise")
    except metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        return f"{project['version']} (a checkout)"


def port(text: str) -> int:
    """Type of an option that is a port."""
    if not (text.isdecimal() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 (any free one) to 65535")
    return int(text)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """What is printed inside is for whoever reads on; `| head` ends it early, and that is no failure."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has to go somewhere when the process ends.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def print_anything() -> None:
    """Text from disk may hold what no encoding can write (half a character): that is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
