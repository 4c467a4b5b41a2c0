"""Starts SGLang where there is no GPU: `python -m workers.rollout.sglang_launch SERVER-ARGUMENTS`, in its own Python.

The wheel is built for CUDA. Without it three things are in the way, and are put right before SGLang is imported:

- `sgl_kernel`, whose CPU build is on no package index: a stand-in with the one function that is really called; SGLang
  then computes with its own pure torch code. An installed one is used as it is.
- torchvision's extension does not load beside torch's CPU build, and two of its operators are looked up all the same;
- processes are spawned, and import everything anew: without CUDA they may be forked.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

_OPERATORS = ("nms", "qnms")


class _Kernels(ModuleType):
    """Every name is there, and most are errors when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own kernels, which are not installed")

        return absent


def _note_slots(
    pool_rows: Tensor, request_to_slots: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _row_length: int
) -> None:
    """For each request: `request_to_slots[pool_row, start:end] =` its next `end - start` of `slots`."""
    taken = 0
    for row, start, end in zip(pool_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        request_to_slots[row, start:end] = slots[taken : taken + count].to(request_to_slots.dtype)
        taken += count


def provide_kernels() -> None:
    if find_spec("sgl_kernel") is not None:
        return
    kernels = _Kernels("sgl_kernel")
    kernels.__spec__ = ModuleSpec("sgl_kernel", loader=None)
    kernels.__dict__["__version__"] = "0.0.0"
    kernels.__dict__["assign_req_to_token_pool_cpu"] = _note_slots
    sys.modules["sgl_kernel"] = kernels


def provide_operators() -> object:
    """What is returned has to live as long as the process."""
    make: Any = torch.library.Library
    library = make("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def fork_processes() -> None:
    """From here on, whichever way is asked for."""
    module: Any = multiprocessing
    set_method = module.set_start_method

    def fork(_method: str | None, force: bool = False) -> None:
        set_method("fork", force=True)

    module.set_start_method = fork


if __name__ == "__main__":
    provide_kernels()
    operators = provide_operators() if torch.version.cuda is None else None
    fork_processes()
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
