"""A configuration that can run, to break in one place at a time."""

from __future__ import annotations

from pathlib import Path

from orchestrator.checks.configuration import problems
from orchestrator.config import Config
from orchestrator.options.load import load

VALID = """\
run:
  name: test
loop:
  num_rollout: 10
model:
  config:
    model_type: qwen3
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
  tokenizer: tokenizer
algorithm:
  use_kl_loss: true
  kl_loss_coef: 0.01
train:
  num_workers: 2
  num_steps_per_rollout: 2
rollout:
  rollout_batch_size: 8
  n_samples_per_prompt: 4
data:
  generator: largest_digit
reward:
  name: largest_digit
"""


def write(directory: Path) -> Path:
    """The file, and the tokenizer directory that it names, in `directory`."""
    (directory / "tokenizer").mkdir(exist_ok=True)
    path = directory / "valid.yaml"
    path.write_text(VALID.replace("tokenizer: tokenizer", f"tokenizer: {directory / 'tokenizer'}"))
    return path


def with_flags(directory: Path, *flags: str) -> Config:
    return load(write(directory), flags)


def said(directory: Path, *flags: str) -> dict[str, str]:
    """What is wrong with the configuration and `flags` together, by key."""
    return {problem.key: problem.message for problem in problems(with_flags(directory, *flags))}
