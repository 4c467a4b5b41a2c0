"""Functions of users are looked for, without running anything of theirs, before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.checks.surroundings import Surroundings, problems
from orchestrator.config import Config
from orchestrator.options.imports import missing


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "strict.py").write_text(
        "from math import sqrt\nLIMIT: int = 3\nalias = sqrt\ndef reward(*a): ...\nasync def slow(*a): ...\n"
    )
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "clever.py").write_text("if True:\n    def reward(*a): ...\n")
    (tmp_path / "judges" / "__init__.py").write_text("raise RuntimeError('this is run by nobody here')")
    return tmp_path


@pytest.mark.parametrize("name", ["reward", "slow", "sqrt", "alias", "LIMIT"])
def test_what_a_module_defines_is_found(code: Path, name: str) -> None:
    assert missing(f"judges.strict:{name}", [str(code)]) is None


def test_what_only_importing_could_tell_is_left_to_that(code: Path) -> None:
    assert missing("clever:anything", [str(code)]) is None
    assert missing("math:sqrt", [*sys.path]) is None


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("judges.strict:rewrd", "has no 'rewrd'; did you mean 'reward'?"),
        ("judges.lenient:reward", "no module 'judges.lenient'"),
        ("nowhere:reward", "in the working directory or on PYTHONPATH"),
        ("broken:reward", "broken.py, line 1"),
    ],
)
def test_what_is_missing_is_said_with_the_nearest_name(code: Path, path: str, said: str) -> None:
    assert said in (missing(path, [str(code)]) or "")


def test_a_run_on_this_machine_is_refused_before_it_starts(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code)
    named = {"reward": {"name": "judges.strict:rewrd"}, "rollout": {"filter": "nowhere:keep"}}
    config = Config.model_validate(named)
    found = {problem.key for problem in problems(config, Surroundings(in_ray_job=False, on_one_machine=True))}
    assert {"reward.name", "rollout.filter"} <= found
    elsewhere = problems(config, Surroundings(in_ray_job=False, on_one_machine=False))
    assert not {"reward.name", "rollout.filter"} & {problem.key for problem in elsewhere}
