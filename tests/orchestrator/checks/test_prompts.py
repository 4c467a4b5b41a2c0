"""Stored data without a prompt that can be used ends with 2 before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.checks import prompts
from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode
from orchestrator.running import interrupts
from tests.e2e.runs import TINY, merged
from tests.orchestrator.valid_config import write

TOKENIZER = str(TINY["model"]["tokenizer"])
DIGITS = "1 2 3 4 5 6 7 8 9"


def rows(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """Every run that was started; none is."""
    calls: list[Config] = []
    module = ModuleType("orchestrator.running.run")
    module.train = lambda config, plan: calls.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orchestrator.running.run", module)
    monkeypatch.setattr(interrupts.signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return calls


def train(directory: Path, *flags: str) -> int:
    tokenizer = ("--model.tokenizer", TOKENIZER, "--data.generator", "null")
    return main(["train", str(write(directory)), *tokenizer, *flags])


def test_a_file_of_over_long_prompts_is_refused_with_their_number(
    started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "rows.jsonl", *[DIGITS] * 7)
    limit = ("--data.max_prompt_len", "4")
    assert train(tmp_path, "--data.path", path, *limit) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "data.path (--data.path): no prompt of this data has between 1 and data.max_prompt_len=4 tokens" in said
    assert "7 were left out" in said
    assert train(tmp_path, "--data.path", f"{path}@[:3]", *limit) == ExitCode.CONFIG
    assert "3 were left out" in capsys.readouterr().err
    assert started == []


def test_one_prompt_that_can_be_used_is_enough(started: list[Config], tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", *[DIGITS] * 7, "1 2")
    assert train(tmp_path, "--data.path", path, "--data.max_prompt_len", "4") == ExitCode.DONE
    assert len(started) == 1


def test_a_file_that_holds_no_prompts_is_refused_too(
    started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1"}\n')
    assert train(tmp_path, "--data.path", "rows.jsonl") == ExitCode.CONFIG
    assert "rows.jsonl:1: no key 'prompt'" in capsys.readouterr().err
    assert started == []


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named_with_its_line(
    started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "rows.jsonl", "187=")
    assert train(tmp_path, "--data.path", path) == ExitCode.CONFIG
    assert "rows.jsonl:1: the tokenizer cannot encode '187='" in capsys.readouterr().err
    assert started == []


def test_data_of_evaluations_is_looked_at_as_well(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", DIGITS)
    evaluation = {"interval": 1, "data": {"path": path, "max_prompt_len": 3}}
    config = Config.model_validate(merged(TINY, {"eval": evaluation}))
    assert [problem.key for problem in prompts.problems(config)] == ["eval.data.path"]


def test_what_is_on_another_machine_is_left_to_that(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", DIGITS)
    data = {"generator": None, "path": path, "max_prompt_len": 3}
    found = []
    for changes in ({}, {"model": {"tokenizer": "/elsewhere"}}, {"data": {"path": "/elsewhere.jsonl"}}):
        config = Config.model_validate(merged(merged(TINY, {"data": data}), changes))
        found.append(len(list(prompts.problems(config))))
    assert found == [1, 0, 0]
