"""docs/slots.md names a test for every invariant that a mutant turns red; mutants fit the source and the suite."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.prove.every_mutant import MUTANTS
from tests.prove.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
INVARIANTS = [f"I{number}" for number in range(1, 13)]


@cache
def suite_of(file: Path) -> dict[str, bool]:
    """The tests in a file, by name; whether `make test` runs them."""
    tree = ast.parse(file.read_text())
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign) and is_marks(node)]
    whole = any("mark.prove" in mark for mark in marks)
    return {
        node.name: not whole and not any("mark.prove" in ast.unparse(one) for one in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def is_marks(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def page() -> dict[str, set[str]]:
    """The tests that each row names."""
    rows = re.findall(r"^\| (I\d+) \|.*$", text := (ROOT / "docs" / "slots.md").read_text(), re.MULTILINE)
    assert rows == INVARIANTS
    return {i: set(re.findall(r"`(test_\w+)`", line)) for line in text.splitlines() for i in rows if f"| {i} |" in line}


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_every_invariant_has_tests_that_a_mutant_of_it_turns_red(invariant: str) -> None:
    named = page()[invariant]
    killers = {killer.partition("::")[2] for m in MUTANTS if m.invariant == invariant for killer in m.killers}
    assert named & killers
    there = {name for path in (ROOT / "tests").rglob("test_*.py") for name in suite_of(path)}
    assert named <= there, named - there


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.hazard)
def test_a_test_that_make_test_runs_sees_it(mutant: Mutant) -> None:
    for killer in mutant.killers:
        file, _, name = killer.partition("::")
        assert suite_of(ROOT / file)[name], f"{killer} is run by `make prove` alone"


def test_every_mutant_still_applies(tmp_path: Path) -> None:
    for mutant in MUTANTS:
        for file in {patch.file for patch in mutant.patches}:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text((ROOT / file).read_text())
        for patch in mutant.patches:
            patch.apply(tmp_path)
