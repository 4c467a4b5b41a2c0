"""What this machine can run, and what is missing. Facts are read at the edge; what they mean is decided purely."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

GIB = 1 << 30
PACKAGES = ("torch", "megatron-core", "ray", "transformers", "transitions", "pydantic", "safetensors")
OPTIONAL = {
    "sglang": "rollout engines on GPUs",
    "wandb": "tracking.wandb",
    "tensorboard": "tracking.tensorboard",
    "jsonschema": "slotwise render --check --crds",
    "cel-python": "slotwise render --check --crds",
}
"""Packages that something needs but the quickstart does not."""
MEMORY_NEEDED, DISK_NEEDED, SHM_NEEDED = 4 * GIB, 2 * GIB, GIB // 4
RAY_PORTS = {6379: "ray start --head", 8265: "the dashboard"}

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. Sizes in bytes."""

    python: tuple[int, int, int]
    packages: Mapping[str, str | None]
    """Version of each of `PACKAGES` and `OPTIONAL`; None: not installed."""
    torch_error: str | None
    """Why torch cannot be imported."""
    torch_cuda: str | None
    """The CUDA version torch was built for; None: a CPU build."""
    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int
    disk_free: Mapping[str, int]
    """Of the working directory and of where Ray puts its files."""
    shm_free: int | None
    """None: there is no /dev/shm."""
    loopback_error: str | None
    """Why no port can be had on loopback."""
    busy_ports: tuple[int, ...]
    """Of Ray's usual ones."""


@dataclass(frozen=True, slots=True)
class Check:
    """`missing`: the quickstart cannot run. `note`: something else cannot, or may be slow."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def examine(facts: Facts) -> tuple[Check, ...]:
    """The verdict, in the order in which things are best mended."""
    return (*_software(facts), *_accelerators(facts), *_room(facts), *_network(facts), *_optional(facts))


def can_run(checks: tuple[Check, ...]) -> bool:
    """Whether the quickstart can."""
    return all(check.level != "missing" for check in checks)


def to_json(facts: Facts, checks: tuple[Check, ...]) -> dict[str, Any]:
    return {"ok": can_run(checks), "checks": [asdict(check) for check in checks], "facts": asdict(facts)}


def _software(facts: Facts) -> Iterator[Check]:
    version = ".".join(map(str, facts.python))
    old = facts.python < (3, 11)
    yield Check("python", "missing" if old else "ok", version, "needs 3.11 or newer" if old else "")
    for package in PACKAGES:
        found = facts.packages[package]
        if found is None:
            yield Check(package, "missing", "not installed", "run `make setup`, or pip install slotwise")
        elif package == "torch" and facts.torch_error is not None:
            yield Check(
                package, "missing", f"{found}, which cannot be imported: {facts.torch_error}", "install it anew"
            )
        elif package == "torch":
            yield Check(
                package, "ok", f"{found}, built for {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'CPU'}"
            )
        else:
            yield Check(package, "ok", found)


def _accelerators(facts: Facts) -> Iterator[Check]:
    if facts.gpus:
        names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in facts.gpus)
        yield Check("gpu", "ok", f"{len(facts.gpus)}: {names}")
    elif facts.torch_cuda is not None:
        yield Check("gpu", "note", "torch is built for CUDA but sees no GPU", "check the driver; CPU runs work")
    else:
        yield Check("gpu", "note", "none; runs are on the CPU, with the embedded engine")


def _room(facts: Facts) -> Iterator[Check]:
    yield Check("cpus", "ok" if facts.cpus >= 2 else "note", str(facts.cpus), "" if facts.cpus >= 2 else "will be slow")
    yield _enough("memory", facts.memory, MEMORY_NEEDED, "missing")
    for path, free in facts.disk_free.items():
        yield _enough(f"disk {path}", free, DISK_NEEDED, "missing")
    if facts.shm_free is None:
        yield Check("shm", "note", "no /dev/shm", "Ray's object store goes to disk and is slow")
    else:
        yield _enough("shm", facts.shm_free, SHM_NEEDED, "note", "in a container: --shm-size, or an emptyDir of Memory")


def _enough(name: str, there: int, needed: int, otherwise: Level, remedy: str = "make room") -> Check:
    if there >= needed:
        return Check(name, "ok", f"{there / GIB:.1f} GiB")
    return Check(name, otherwise, f"{there / GIB:.1f} GiB of the {needed / GIB:g} GiB that a run needs", remedy)


def _network(facts: Facts) -> Iterator[Check]:
    if facts.loopback_error is not None:
        yield Check("loopback", "missing", facts.loopback_error, "processes of a run talk over 127.0.0.1")
    else:
        yield Check("loopback", "ok", "ports can be had")
    for port in facts.busy_ports:
        use = RAY_PORTS[port]
        yield Check("port", "note", f"{port} is in use", f"{use} needs another port; a run of its own takes a free one")


def _optional(facts: Facts) -> Iterator[Check]:
    for package, use in OPTIONAL.items():
        found = facts.packages[package]
        yield Check(package, "note" if found is None else "ok", found or "not installed", "" if found else f"for {use}")


def look(directory: Path) -> Facts:
    """Read the facts of this machine, for runs in `directory`."""
    torch_error, torch_cuda, gpus = _torch()
    version = sys.version_info
    temporary = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    shm = Path("/dev/shm")
    return Facts(
        python=(version.major, version.minor, version.micro),
        packages={name: _version(name) for name in (*PACKAGES, *OPTIONAL)},
        torch_error=torch_error,
        torch_cuda=torch_cuda,
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        disk_free={path: shutil.disk_usage(path).free for path in dict.fromkeys((str(directory), temporary))},
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else None,
        loopback_error=_loopback(),
        busy_ports=tuple(port for port in RAY_PORTS if _is_busy(port)),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    """Why it cannot be imported, the CUDA it is built for, and the GPUs it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}", None, ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return None, torch.version.cuda, tuple(Gpu(device.name, device.total_memory) for device in found)


def _loopback() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5.0).close()
    except OSError as error:
        return f"no connection over 127.0.0.1: {error}"
    return None


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
