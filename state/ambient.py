"""What a borrow must leave as it was beside the weights: train/eval mode of every module, and random state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Ambient(Protocol):
    """Captures surroundings of the weights and puts them back."""

    def capture(self) -> object:
        """An immutable value that `restore` understands."""

    def restore(self, captured: object) -> None: ...


@dataclass(frozen=True, slots=True)
class _Captured:
    training: tuple[bool, ...]
    cpu: Tensor
    cuda: tuple[Tensor, ...]


class TorchAmbient:
    """Train/eval flags of a module tree, and torch's random state on the CPU and every visible GPU."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def capture(self) -> object:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
        return _Captured(tuple(m.training for m in self._module.modules()), torch.get_rng_state(), cuda)

    def restore(self, captured: object) -> None:
        assert isinstance(captured, _Captured)
        for module, training in zip(self._module.modules(), captured.training, strict=True):
            module.training = training
        torch.set_rng_state(captured.cpu)
        if captured.cuda:
            torch.cuda.set_rng_state_all(list(captured.cuda))
