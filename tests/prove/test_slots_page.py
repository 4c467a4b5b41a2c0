"""docs/slots.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "slots.md").read_text()))
    there = {n for path in (ROOT / "tests").rglob("test_*.py") for n in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) >= 14
    assert named <= there, named - there


def test_every_test_that_should_kill_a_mutant_exists() -> None:
    from tests.prove.mutants import MUTANTS

    for killer in {killer for mutant in MUTANTS for killer in mutant.killers}:
        file, _, name = killer.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), killer


def test_every_mutant_still_applies(tmp_path: Path) -> None:
    from tests.prove.mutants import MUTANTS

    for mutant in MUTANTS:
        for file in {patch.file for patch in mutant.patches}:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text((ROOT / file).read_text())
        for patch in mutant.patches:
            patch.apply(tmp_path)
