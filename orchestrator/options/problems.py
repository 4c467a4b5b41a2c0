"""What is wrong with a configuration: one value for each thing, and the error that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from state.errors import SlotwiseError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration. `where` is a line of a file, a flag, or empty for a combination."""

    key: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.key}{place}: {self.message}"


class ConfigError(SlotwiseError):
    """The configuration cannot run; `problems` holds everything that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
