"""The SGLang server of one engine as a process: its command, its environment, its life."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state.errors import SlotwiseError
from workers.ports import PortReservation, reserve
from workers.rollout import server_keeper, sglang_plugin
from workers.rollout.scratch import Scratch
from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient
from workers.rollout.sglang_options import SglangOptions, flags

_ROOT = Path(__file__).parents[2]
_CARRIED = (
    "state/__init__.py",
    "state/digest.py",
    "state/digest_cpu.py",
    "state/digest_cuda.py",
    "state/digest_records.py",
    "state/mixing.py",
    "state/rows.py",
    "workers/__init__.py",
    "workers/rollout/__init__.py",
    "workers/rollout/noise.py",
    "workers/rollout/sglang_layout.py",
    "workers/rollout/sglang_plugin.py",
    "workers/rollout/sglang_launch.py",
    "workers/weights/__init__.py",
    "workers/weights/shared_memory.py",
)
"""What the server's Python imports of ours, copied to a folder of its own: that Python may have other packages."""
_PORTS_EACH = 2
_STOP_LIMIT_S = 20.0
_ATTEMPTS = 3
_POLL_S = 0.1
_TAIL_LINES = 15
_TAKEN = ("address already in use", "Address already in use", "is not available")


class ServerDied(SlotwiseError):
    """The server's process is no more; the message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to serve. `name` is what the server answers to."""

    name: str
    model: str
    """A Hugging Face directory, or the text of a `config.json`: weights arrive later."""
    tokenizer: str | None
    dtype: str
    device: str
    max_batch_size: int
    options: SglangOptions
    log: Path
    start_timeout_s: float
    host: str = "127.0.0.1"
    """Loopback: only the engine's own actor talks to its server."""


def command(spec: ServerSpec, model_path: str, ports: Sequence[int]) -> list[str]:
    """The server's command line. Pure."""
    on_cpu = spec.device == "cpu"
    ours: dict[str, Any] = {
        "model_path": model_path,
        "served_model_name": spec.name,
        "tokenizer_path": spec.tokenizer,
        "skip_tokenizer_init": spec.tokenizer is None,
        "dtype": spec.dtype,
        "device": spec.device,
        "load_format": "dummy",  # random tensors, which are no slot's weights
        "host": spec.host,
        "port": ports[0],
        "nccl_port": ports[1],
        "tp_size": spec.options.tp_size,
        "sampling_backend": "pytorch",  # the one that draws each row from a seed of its own
        "max_running_requests": spec.max_batch_size,
        "skip_server_warmup": True,
    }
    if on_cpu:
        ours |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": 16384,
            "sleep_on_idle": True,  # else its scheduler spins on a core that ranks and other engines need
        }
    module = "workers.rollout.sglang_launch" if on_cpu else "sglang.launch_server"
    return [spec.options.python, "-m", module, *flags(ours | dict(spec.options.server))]


def environment(spec: ServerSpec, inherited: Mapping[str, str], plugin: str) -> dict[str, str]:
    """Ours first on PYTHONPATH; whatever else the user has set stays as it is. Pure."""
    defaults = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "OMP_NUM_THREADS": "1"}
    if spec.device == "cpu":
        defaults["SGLANG_USE_CPU_ENGINE"] = "1"
        if spec.options.tp_size > 1:
            cpus = sorted(os.sched_getaffinity(0))
            defaults["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cpus[rank % len(cpus)]) for rank in range(spec.options.tp_size)
            )
    result = defaults | dict(inherited) | dict(spec.options.env)
    result["PYTHONPATH"] = os.pathsep.join([plugin, *filter(None, [result.get("PYTHONPATH")])])
    if wanted := result.get("SGLANG_PLUGINS"):
        result["SGLANG_PLUGINS"] = f"{wanted},slotwise"
    return result


def write_plugin(folder: Path) -> None:
    """A folder that is a distribution once it is on PYTHONPATH: our code, and where the server finds its start."""
    for name in _CARRIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_ROOT / name, folder / name)
    about = folder / "slotwise_sglang-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slotwise-sglang\nVersion: 1\n")
    (about / "entry_points.txt").write_text(sglang_plugin.ENTRY_POINTS)


class SglangServer:
    """A running server. It ends with this process, however that ends, and leaves no process or file but its log."""

    def __init__(self, spec: ServerSpec) -> None:
        """Returns when the server answers. `ServerDied` when it does not come up."""
        self._spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _ATTEMPTS + 1):
            self._ports = reserve(_PORTS_EACH, start_at=os.getpid() + attempt * 1000)
            self.client = SglangClient(spec.host, self._ports.first)
            self._scratch = Scratch()
            self._process = _start(spec, self._ports, self._scratch)
            try:
                self._wait_until_up()
                return
            except BaseException as error:
                self.stop()
                taken = isinstance(error, ServerDied) and any(words in str(error) for words in _TAKEN)
                if not taken or attempt == _ATTEMPTS:
                    raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def alive_after(self, within_s: float) -> bool:
        """False as soon as it ends within that time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self.alive

    @property
    def pid(self) -> int:
        """Of the process that keeps the server: the server ends with it."""
        return self._process.pid

    def why_dead(self) -> str:
        """The exit code, and the last lines of the log."""
        code = self._process.poll()
        return f"the server of {self._spec.name} ended with code {code}; last in {self._spec.log}:\n{self._tail()}"

    def stop(self) -> None:
        """End it; returns when every process of it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_LIMIT_S)
        self._scratch.remove()
        self._ports.close()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self._spec.start_timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise ServerDied(self.why_dead())
            with suppress(ServerSilent, ServerRefused):
                self.client.get("/health", limit_s=5.0)
                name = self.client.get("/model_info", limit_s=5.0).get("served_model_name", self._spec.name)
                if name == self._spec.name:
                    return
            time.sleep(_POLL_S)
        raise ServerDied(
            f"the server of {self._spec.name} was not up after {self._spec.start_timeout_s:g} s; last in "
            f"{self._spec.log}:\n{self._tail()}"
        )

    def _tail(self) -> str:
        with suppress(OSError):
            return "\n".join(self._spec.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return "(no log)"


def _start(spec: ServerSpec, ports: PortReservation, own: Scratch) -> subprocess.Popen[bytes]:
    scratch = own.path
    write_plugin(scratch / "plugin")
    (scratch / "tmp").mkdir()
    arguments = command(spec, _model_path(spec, scratch), ports.ports)
    keeper = [sys.executable, server_keeper.__file__, str(scratch), "--", *arguments]
    with spec.log.open("ab") as log:
        return subprocess.Popen(
            keeper,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(spec, os.environ, str(scratch / "plugin")) | {"TMPDIR": str(scratch / "tmp")},
            start_new_session=True,
            pass_fds=(own.lock,),
        )


def _model_path(spec: ServerSpec, scratch: Path) -> str:
    if not spec.model.startswith("{"):
        return spec.model
    directory = scratch / "model"
    directory.mkdir()
    (directory / "config.json").write_text(spec.model)
    return str(directory)
