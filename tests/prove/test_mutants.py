"""Each fault that systems like this one really had turns a test of ours red."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.prove.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("state", "workers", "orchestrator", "tests", "examples")
PASSED = 0
KILLED = (1, -signal.SIGSEGV)
"""A test failed, or memory that was released was read and ended the process."""

FAST = [m for m in MUTANTS if all(test.startswith("tests/state/") for test in m.killers)]
REST = [m for m in MUTANTS if m not in FAST]


def copy_tree(source: Path, target: Path, link: bool) -> Path:
    """The packages and their tests. Linked files share their bytes with the source: replace, never write into them."""
    target.mkdir(parents=True)
    leave = shutil.ignore_patterns("*.jsonl", ".*") if link else shutil.ignore_patterns("__pycache__", ".*")
    for part in PARTS:
        shutil.copytree(source / part, target / part, copy_function=os.link if link else shutil.copy2, ignore=leave)
    shutil.copy(source / "pyproject.toml", target)
    return target


def apply(mutant: Mutant, root: Path) -> None:
    for file in {patch.file for patch in mutant.patches}:
        source = (root / file).read_bytes()
        (root / file).unlink()
        (root / file).write_bytes(source)
    for patch in mutant.patches:
        patch.apply(root)


def run_all(directory: Path, jobs: Sequence[tuple[Path, tuple[str, ...]]], seconds: int) -> list[int]:
    asked = directory / "jobs.json"
    asked.write_text(json.dumps([{"root": str(r), "tests": list(t), "seconds": seconds} for r, t in jobs]))
    command = [sys.executable, "-m", "tests.prove.mutant_server", str(asked)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, timeout=seconds * (len(jobs) + 1)
    )
    return [int(code) for code in json.loads(done.stdout.decode().splitlines()[-1])]


def survivors(directory: Path, mutants: Sequence[Mutant], seconds: int) -> dict[str, str]:
    """By hazard, what became of those that were not killed, or could not be applied."""
    base = copy_tree(ROOT, directory / "base", link=False)
    named = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.killers))
    (sound,) = run_all(directory, [(base, named)], seconds)
    assert sound == PASSED, f"without a mutant: {(base / 'pytest.out').read_text()[-4000:]}"
    found, jobs = {}, []
    for number, mutant in enumerate(mutants):
        root = copy_tree(base, directory / str(number), link=True)
        try:
            apply(mutant, root)
        except LookupError as error:
            found[mutant.hazard] = f"the patch does not apply: {error}"
            continue
        jobs.append((mutant, root))
    codes = run_all(directory, [(root, mutant.killers) for mutant, root in jobs], seconds)
    for (mutant, root), code in zip(jobs, codes, strict=True):
        if code not in KILLED:
            found[mutant.hazard] = f"pytest ended with {code}: {(root / 'pytest.out').read_text()[-1500:]}"
    return found


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return survivors(tmp_path_factory.mktemp("fast"), FAST, seconds=100)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hazard", [m.hazard for m in FAST])
def test_the_suite_sees(fast: dict[str, str], hazard: str) -> None:
    assert hazard not in fast, fast[hazard]


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_tests_of_workers_and_the_orchestrator_see_the_rest(tmp_path: Path) -> None:
    left = survivors(tmp_path, REST, seconds=600)
    print(f"\nmutants: {len(MUTANTS) - len(left)} killed of {len(MUTANTS)} ({len(FAST)} by tests of `state` alone)")
    assert left == {}
