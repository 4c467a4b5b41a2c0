"""A rank starts without what it never uses, and nothing is missing afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.megatron.lean_import import compiles

REPO = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from workers.megatron.lean_import import lean_import
original = torch.compile
with lean_import(compiler=True):
    assert torch.compile is original
with lean_import(compiler=False):
    import workers.megatron.worker
print(*[name for name in ("wandb", "torch._inductor.compile_fx", "torch._dynamo") if name in sys.modules])
import wandb
assert torch.compile is original
"""


def test_a_rank_loads_no_wandb_and_a_compiler_only_where_it_compiles() -> None:
    pytest.importorskip("wandb")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


def test_who_lets_torch_compile_keeps_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("1", False), ("0", True)):
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", said)
        assert compiles() is expected
