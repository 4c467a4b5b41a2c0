"""Errors at every point where bytes move or a callback runs, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GARBAGE = -99.0


class Injected(Exception):
    """The error that is injected. Whoever catches it must not take it for one of ours."""


class Faults(TorchFunctionMode):
    """While entered, counts the points that are passed, and raises at the one that is armed.

    Copies, clones, moved pointers and storages are points by themselves; callbacks call `point`. A copy that fails has
    written something already.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._armed: int | None = None
        self._moves: dict[Any, str] = {
            torch.Tensor.copy_: "copy",
            torch.Tensor.clone: "clone",
            torch.Tensor.data.__set__: "point",  # type: ignore[attr-defined]
            torch.Tensor.untyped_storage: "storage",
        }

    def arm(self, point: int | None) -> None:
        self.seen, self._armed = [], point

    def point(self, name: str) -> None:
        """Here an error may come."""
        self.seen.append(f"{name}#{len(self.seen)}")
        if self._armed == len(self.seen) - 1:
            raise Injected(self.seen[-1])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self._moves.get(func)
        if name is not None:
            try:
                self.point(name)
            except Injected:
                if name == "copy":
                    args[0].fill_(17)
                raise
        return func(*args, **(kwargs or {}))
