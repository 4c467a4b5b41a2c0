"""Whoever starts and steers the workers loads nothing that they alone compute with, and so starts seconds earlier."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "orchestrator.running.run",
        "orchestrator.rollout_manager",
        "workers.megatron.actor",
        "workers.rollout.embedded_actor",
        "workers.rollout.sglang_actor",
    ],
)
def test_no_torch_is_loaded_by(module: str) -> None:
    heavy = "{'torch', 'transformers', 'megatron'}"
    code = f"import sys, {module}; print({heavy} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.stderr) == ("set()", "")
