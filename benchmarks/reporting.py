"""How a benchmark says what it measured: with command and date, on the terminal and where asked for in a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report(measured: Mapping[str, Any], out: Path | None) -> None:
    """One JSON object; `measured` says what machine it was."""
    about = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    text = json.dumps(about | dict(measured), indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
