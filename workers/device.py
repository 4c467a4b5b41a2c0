"""Where a worker computes."""

from typing import Literal

Device = Literal["cpu", "cuda"]
