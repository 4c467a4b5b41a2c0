"""`path@[slice]`: which file or directory, and which of its rows. Pure; looks at text alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from state.errors import SlotwiseError

_SLICED = re.compile(r"(?P<path>.*)@\[(?P<slice>[^\[\]]*)\]", re.DOTALL)
_INTEGER = re.compile(r"\s*([+-]?\d+)?\s*")


class DataPathError(SlotwiseError, ValueError):
    """What follows `@` is no slice."""


@dataclass(frozen=True, slots=True)
class DataPath:
    """`rows` selects as it would from a Python list, by position before any shuffling; None: all."""

    path: Path
    rows: slice | None = None

    @property
    def suffix(self) -> str:
        """`@[start:stop:step]` as it was meant, however it was written; empty for all rows."""
        if self.rows is None:
            return ""
        parts = [self.rows.start, self.rows.stop] + ([] if self.rows.step is None else [self.rows.step])
        return f"@[{':'.join('' if part is None else str(part) for part in parts)}]"


def parse(text: str) -> DataPath:
    """Raises `DataPathError` for a slice that Python would not take, and for a lone index, which is none."""
    matched = _SLICED.fullmatch(text)
    if matched is None:
        return DataPath(Path(text))
    parts = [_INTEGER.fullmatch(part) for part in matched["slice"].split(":")]
    if not 2 <= len(parts) <= 3 or any(part is None for part in parts):
        raise DataPathError(
            f"@[{matched['slice']}] is no slice; write @[start:stop] or @[start:stop:step], e.g. @[-100:]"
        )
    numbers = [None if part is None or part[1] is None else int(part[1]) for part in parts]
    rows = slice(*numbers)
    if rows.step == 0:
        raise DataPathError(f"@[{matched['slice']}] has step 0; use 1 or more, or a negative step to go backwards")
    return DataPath(Path(matched["path"]), rows)
