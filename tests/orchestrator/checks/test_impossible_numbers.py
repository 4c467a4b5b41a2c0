"""Models that cannot be, batches of any size, and directories that would eat each other: refused at once, with what
would work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checks.configuration import problems
from orchestrator.checks.divisors import divisors
from orchestrator.cli import main
from orchestrator.exit_codes import ExitCode
from orchestrator.options.load import load
from tests.orchestrator.valid_config import with_flags

WHOLE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "eos_token_id": [1, 2],
}


def said(directory: Path, changes: dict[str, Any], *flags: str) -> str:
    config = with_flags(directory, "--model.config", json.dumps(WHOLE | changes), *flags)
    return "\n".join(map(str, problems(config)))


IMPOSSIBLE: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, (), "heads: 5 heads do not divide hidden_size 48"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, (), "valid: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
    ({"num_key_value_heads": 4}, (), "num_key_value_heads: 4 do not divide num_attention_heads 6; valid: 1, 2, 3, 6"),
    ({"num_attention_heads": 16}, (), "head_dim: heads of 3 cannot be rotated"),
    ({"head_dim": 7}, (), "use an even number"),
    ({"vocab_size": -1}, (), "vocab_size: given -1; accepted: a whole number of at least 1"),
    ({"vocab_size": 0}, (), "vocab_size: given 0"),
    ({"hidden_size": "48"}, (), "hidden_size: given '48'"),
    ({"num_hidden_layers": True}, (), "num_hidden_layers: given True"),
    ({"intermediate_size": 1.5}, (), "intermediate_size: given 1.5"),
    ({"max_position_embeddings": -4}, (), "max_position_embeddings: given -4"),
    ({"eos_token_id": [1, 32]}, (), "eos_token_id: 32 is no token of vocab_size 32; use 0 to 31"),
    ({"pad_token_id": "x"}, (), "pad_token_id: 'x' is no token"),
    ({}, ("--train.tensor_model_parallel_size", "4", "--train.num_workers", "4"), "valid: 1, 2, 3, 6"),
    ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 90},
     ("--train.tensor_model_parallel_size", "4", "--train.num_workers", "4"), "4 does not divide intermediate_size 90"),
    ({}, ("--train.pipeline_model_parallel_size", "3", "--train.num_workers", "3"), "valid: 1, 2, 4"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, (), "5 of 4 experts; use at most 4"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "flags", "expected"), IMPOSSIBLE)
def test_a_model_that_cannot_be_is_refused_with_what_would_work(
    tmp_path: Path, changes: dict[str, Any], flags: tuple[str, ...], expected: str
) -> None:
    assert said(tmp_path, {}) == ""
    assert expected in said(tmp_path, changes, *flags)


def test_a_config_of_files_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with_flags(tmp_path)
    (tmp_path / "hf").mkdir()
    flags = ("--model.config", "null", "--model.hf_checkpoint", "hf", "--model.megatron_to_hf_mode", "bridge")
    for fields, code in ((WHOLE, ExitCode.DONE), (WHOLE | {"num_key_value_heads": 4}, ExitCode.CONFIG)):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(fields))
        assert main(["train", "valid.yaml", *flags, "--dry-run"]) == code
    assert "model.hf_checkpoint (--model.hf_checkpoint): config.json: num_key_value_heads" in capsys.readouterr().err


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with_flags(tmp_path)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    told = {"model": {"vocab": {"a": 0, "b": 31}}, "added_tokens": [{"id": 30}]}
    flags = ("train", "valid.yaml", "--model.config", json.dumps(WHOLE), "--dry-run")
    for changes, code in (
        ({}, ExitCode.DONE),
        ({"added_tokens": [{"id": 32}]}, ExitCode.CONFIG),
        ({"model": {"vocab": [["a", 0.5]] * 33}}, ExitCode.CONFIG),
        ({"model": [], "added_tokens": [{}, 3]}, ExitCode.DONE),
    ):
        file.write_text(json.dumps(told | changes))
        assert main(flags) == code, changes
        assert ("32 is less than the 33 tokens" in capsys.readouterr().err) == (code is ExitCode.CONFIG)
    file.write_text("xx")
    assert main(flags) == ExitCode.CONFIG
    assert "tokenizer.json is not JSON" in capsys.readouterr().err


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [10**9, 2**31 - 1, 10**18 + 9, 2**63 - 1])
def test_a_batch_of_any_size_is_judged_at_once(tmp_path: Path, prompts: int) -> None:
    began = time.monotonic()
    flags = ("--rollout.rollout_batch_size", str(prompts), "--train.num_steps_per_rollout", "1000003")
    found = [str(problem) for problem in problems(with_flags(tmp_path, *flags))]
    assert any("cannot be cut into 1000003 steps over 2 data-parallel ranks" in one for one in found)
    assert time.monotonic() - began < 5


def test_divisors_are_all_and_nothing_else() -> None:
    for number in (*range(1, 200), 99_991 * 99_989):
        assert divisors(number) == sorted(
            {n for d in range(1, min(number, 100_000) + 1) if number % d == 0 for n in (d, number // d)}
        )


@pytest.mark.parametrize("steps", range(1, 40))
def test_steps_are_accepted_exactly_where_they_are_said_to_be_valid(tmp_path: Path, steps: int) -> None:
    ranks, samples = 2, 8 * 4
    flags = ("--train.num_workers", str(ranks), "--train.num_steps_per_rollout", str(steps))
    found = [problem for problem in problems(with_flags(tmp_path, *flags)) if "steps" in problem.message]
    assert bool(found) == (samples % steps != 0 or samples // steps % ranks != 0)
    by_size = ("--train.num_workers", str(ranks), "--train.num_steps_per_rollout", "null")
    found = list(problems(with_flags(tmp_path, *by_size, "--train.global_batch_size", str(steps))))
    assert bool(found) == (samples % steps != 0 or steps % ranks != 0)


# ---- directories -----------------------------------------------------------------------------------------------------

SAVES = ("--checkpoint.save_interval", "1")
EXPORTS = ("--checkpoint.save_hf_interval", "1")


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ((*SAVES, "--checkpoint.save", "runs/test/journal"), "checkpoint.save"),
        ((*SAVES, "--checkpoint.save", "runs/test/logs/../journal/deep"), "checkpoint.save"),
        ((*SAVES, "--checkpoint.save", "runs/test/logs"), "checkpoint.save"),
        ((*EXPORTS, *SAVES, "--checkpoint.save_hf", "runs/test/checkpoints/{rollout_id}"), "checkpoint.save_hf"),
        (
            (*EXPORTS, *SAVES, "--checkpoint.save", "c", "--checkpoint.save_hf", "c/hf/{rollout_id}"),
            "checkpoint.save_hf",
        ),
        (("--debug.save_rollouts", "runs/test/journal"), "debug.save_rollouts"),
        ((*SAVES, "--checkpoint.save", "runs/test/journals"), None),
        ((*SAVES, "--checkpoint.save", "elsewhere"), None),
        ((*EXPORTS, *SAVES, "--checkpoint.save_hf", "runs/test/exports/{rollout_id}"), None),
    ],
)
def test_a_directory_that_another_part_of_the_run_clears_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], refused: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with_flags(tmp_path)
    assert [problem.key for problem in problems(load("valid.yaml", flags))] == ([refused] if refused else [])
