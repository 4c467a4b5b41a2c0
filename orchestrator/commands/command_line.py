"""What the commands share: how they read their arguments and print JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from orchestrator.options import ConfigError, Problem


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a problem of the configuration."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem(self.prog, message)])


def parser(command: str, about: str) -> Parser:
    return Parser(prog=f"slotwise {command}", description=about, allow_abbrev=False)


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)
