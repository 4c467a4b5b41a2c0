"""Lets stock megatron-core, which says `cuda` throughout, run on a CPU.

Two functions of torch.cuda and one mode are replaced while a `redirect()` is open:

- `torch.cuda.current_device` answers "cpu" (Megatron only passes it on as a device), `torch.cuda.synchronize` does
  nothing. They are replaced for the whole process, and put back when the last thread leaves.
- calls of torch functions in *this thread* that name a CUDA device are sent to the CPU.

So every thread that runs Megatron's code opens a redirect of its own, at the entry point of its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workers.device import Device


class CudaInUse(RuntimeError):
    """A redirect was asked for in a process that computes on a GPU."""


def needed(device: Device) -> bool:
    """Whether Megatron has to be redirected to run on `device`."""
    return device == "cpu"


@contextmanager
def redirect(device: Device = "cpu") -> Iterator[None]:
    """Inside, what Megatron does on `cuda` happens on the CPU; for device `cuda` nothing is replaced.

    Works for the current thread; may be nested. Raises CudaInUse where this process has a CUDA context already,
    since replacing `torch.cuda.current_device` would mislead that work.
    """
    if not needed(device):
        yield
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise CudaInUse(
            "this process computes on a GPU already, so Megatron cannot be redirected to the CPU here; "
            "train with device cuda, or run the CPU work in a process of its own with CUDA_VISIBLE_DEVICES empty"
        )
    _replaced.acquire()
    try:
        with _ToCpu():
            yield
    finally:
        _replaced.release()


class _ToCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by names such as 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _Replaced:
    """The two functions of torch.cuda, replaced while at least one redirect is open in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._originals = (torch.cuda.current_device, torch.cuda.synchronize)

    def acquire(self) -> None:
        with self._lock:
            if self._open == 0:
                self._originals = (torch.cuda.current_device, torch.cuda.synchronize)
                self._set(lambda: "cpu", lambda device=None: None)
            self._open += 1

    def release(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._set(*self._originals)

    @staticmethod
    def _set(current_device: Callable[[], Any], synchronize: Callable[..., Any]) -> None:
        torch.cuda.current_device = current_device
        torch.cuda.synchronize = synchronize


# What it counts, torch.cuda's own functions, exists once per process: so does this.
_replaced = _Replaced()
