"""Memory that another process of this machine opens, by a handle of plain values, never a pickle.

On a GPU through CUDA IPC, on a CPU a shared memory file. Imports torch alone, so that it runs inside an engine's
process.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage


def allocate(nbytes: int, device: str) -> Tensor:
    """uint8 [nbytes], whose memory can be exported."""
    if device == "cpu":
        return torch.empty(0, dtype=torch.uint8).set_(UntypedStorage._new_using_filename_cpu(nbytes))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def export_buffer(buffer: Tensor) -> str:
    """A handle of the buffer's memory that another process of this machine can open."""
    storage = buffer.untyped_storage()
    share: Callable[[], tuple[Any, ...]] = storage._share_cuda_ if buffer.is_cuda else storage._share_filename_cpu_
    parts = share()
    return json.dumps({"device": buffer.device.type, "size": buffer.numel(), "parts": [_plain(part) for part in parts]})


def size_of(handle: str) -> int:
    """Bytes of the buffer."""
    return int(json.loads(handle)["size"])


def import_buffer(handle: str) -> Tensor:
    """The buffer of another process; valid as long as that process keeps it."""
    told: dict[str, Any] = json.loads(handle)
    parts = [_unplain(part) for part in told["parts"]]
    if told["device"] == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = UntypedStorage._new_shared_cuda(*parts)
    else:
        storage = UntypedStorage._new_shared_filename_cpu(*parts)
    return torch.empty(0, dtype=torch.uint8, device=told["device"]).set_(storage)[: told["size"]]


def _plain(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _unplain(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
