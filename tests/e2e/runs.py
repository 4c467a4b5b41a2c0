"""Real runs of the real command, small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

REPO = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "run": {"name": "tiny"},
    "loop": {"num_rollout": 2},
    "model": {
        "tokenizer": str(REPO / "examples" / "quickstart"),
        "dtype": "float32",
        "config": {
            "model_type": "qwen3",
            "vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    },
    "train": {"num_workers": 2, "lr": 3e-3, "cpus_per_worker": 0.1, "timeout_s": 120.0},
    "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.01},
    "rollout": {
        "num_engines": 1,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "max_response_len": 4,
        "cpus_per_engine": 0.1,
    },
    "data": {"generator": "largest_digit"},
    "reward": {"name": "largest_digit"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in changes.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


@dataclass(frozen=True)
class Ended:
    code: int
    output: str


@dataclass(frozen=True)
class Place:
    """A directory in which runs are started with the command line, as a user would."""

    path: Path
    address: str | None = None

    def config(self, name: str, changes: dict[str, Any]) -> Path:
        """A configuration file for a run called `name`, in `self.path / name`."""
        content = merged(TINY, {"run": {"name": name, "dir": str(self.path / name)}} | changes)
        if self.address is not None:
            content = merged(content, {"cluster": {"address": self.address}})
        file = self.path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *map(str, arguments)],
            cwd=REPO,
            env=environment | {"PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str | Path, timeout_s: float = 300.0) -> Ended:
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{arguments} did not end within {timeout_s:g} s:\n{output}") from None
        return Ended(process.returncode, output)

    def train(self, name: str, changes: dict[str, Any], *flags: str, code: int = 0) -> Ended:
        """`slotwise train`; asserts how it ends."""
        ended = self.run("train", self.config(name, changes), *flags)
        assert ended.code == code, ended.output
        return ended


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def journal(run_dir: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in lines(run_dir / "journal" / f"{name}.jsonl") if entry["kind"] == kind]


def marker(root: Path, iteration: int) -> dict[str, Any]:
    return json.loads((root / f"iter_{iteration:07d}" / "slotwise.json").read_text())


def until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return value


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def without_rays_agents(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Ray's own two agents notice within a minute or so that their cluster was killed; all others do at once."""
    agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    return [p for p in alive(processes) if not agents & {word.strip() for word in p.cmdline()}]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
