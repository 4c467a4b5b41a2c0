"""Each fault that systems like this one really had turns a test of ours red, and where it leaves a trace in a journal,
the audit finds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from state.audit import audit
from tests.prove.every_mutant import MUTANTS
from tests.prove.mutant import Mutant, Trace

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("state", "workers", "orchestrator", "tests", "examples")
PASSED = 0
KILLED = (1, -signal.SIGSEGV)
"""A test failed, or memory that was released was read and ended the process."""

FAST = [m for m in MUTANTS if all(test.startswith("tests/state/") for test in m.killers)]
REST = [m for m in MUTANTS if m not in FAST]
TRACED = [m for m in MUTANTS if isinstance(m.trace, Trace)]


@dataclass
class Trees:
    """A copy of the packages and their tests, and one more for each mutant, by hazard. `moved`: why some have none."""

    directory: Path
    base: Path
    of: dict[str, Path] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def run(self, jobs: Sequence[Mapping[str, Any]], seconds: int) -> list[int]:
        asked = self.directory / "jobs.json"
        asked.write_text(json.dumps([{**job, "root": str(job["root"]), "seconds": seconds} for job in jobs]))
        command = [sys.executable, "-m", "tests.prove.mutant_server", str(asked)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        limit = seconds * (len(jobs) + 1)
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, timeout=limit)
        return [int(code) for code in json.loads(done.stdout.decode().splitlines()[-1])]


def copy_tree(source: Path, target: Path, link: bool) -> Path:
    """Linked files share their bytes with the source: replace, never write into them."""
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


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    directory = tmp_path_factory.mktemp("mutants")
    made = Trees(directory, copy_tree(ROOT, directory / "base", link=False))
    for number, mutant in enumerate(MUTANTS):
        root = copy_tree(made.base, directory / str(number), link=True)
        try:
            apply(mutant, root)
            made.of[mutant.hazard] = root
        except LookupError as error:
            made.moved[mutant.hazard] = f"the patch does not apply: {error}"
    return made


# ---- tests see them ------------------------------------------------------------------------------------------------


def survivors(trees: Trees, mutants: Sequence[Mutant], seconds: int) -> dict[str, str]:
    """By hazard, what became of those that were not killed, or could not be applied."""
    named = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.killers))
    (sound,) = trees.run([{"root": trees.base, "tests": named}], seconds)
    assert sound == PASSED, f"without a mutant: {(trees.base / 'pytest.out').read_text()[-4000:]}"
    found = {m.hazard: trees.moved[m.hazard] for m in mutants if m.hazard in trees.moved}
    there = [m for m in mutants if m.hazard in trees.of]
    codes = trees.run([{"root": trees.of[m.hazard], "tests": m.killers} for m in there], seconds)
    for mutant, code in zip(there, codes, strict=True):
        if code not in KILLED:
            told = (trees.of[mutant.hazard] / "pytest.out").read_text()[-1500:]
            found[mutant.hazard] = f"pytest ended with {code}: {told}"
    return found


@pytest.fixture(scope="module")
def fast(trees: Trees) -> dict[str, str]:
    return survivors(trees, FAST, seconds=200)


@pytest.mark.parametrize("hazard", [m.hazard for m in FAST])
def test_the_suite_sees(fast: dict[str, str], hazard: str) -> None:
    assert hazard not in fast, fast[hazard]


def test_tests_of_workers_and_the_orchestrator_see_the_rest(
    trees: Trees, fast: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    left = survivors(trees, REST, seconds=600)
    killed = len(MUTANTS) - len(left) - len(fast)
    record_property("counted", f"mutants: {killed} killed of {len(MUTANTS)} ({len(FAST)} by tests of `state` alone)")
    assert left == {}


# ---- the audit sees them -------------------------------------------------------------------------------------------


def findings(trees: Trees, asked: Mapping[str, tuple[Path, str]]) -> dict[str, list[str]]:
    """By name, what the audit of this tree finds in the journals that a scenario leaves behind in another."""
    places = {name: trees.directory / "runs" / str(number) for number, name in enumerate(asked)}
    jobs = [{"root": root, "scenario": scenario, "out": str(places[name])} for name, (root, scenario) in asked.items()]
    ended = dict(zip(asked, trees.run(jobs, seconds=300), strict=True))
    failed = {name: code for name, code in ended.items() if code == 1 and asked[name][0] == trees.base}
    assert not failed, f"{failed}: {(trees.base / 'scenario.out').read_text()[-3000:]}"
    found = {name: [str(finding) for finding in audit(place).findings] for name, place in places.items()}
    shutil.rmtree(trees.directory / "runs")
    return found


def test_the_audit_finds_every_mutant_that_leaves_a_trace(
    trees: Trees, record_property: Callable[[str, object], None]
) -> None:
    traces = {m.hazard: m.trace for m in TRACED if isinstance(m.trace, Trace) and m.hazard in trees.of}
    sound = findings(trees, {t.scenario: (trees.base, t.scenario) for t in traces.values()})
    mutated = findings(trees, {hazard: (trees.of[hazard], t.scenario) for hazard, t in traces.items()})
    missed, false = {}, {}
    for hazard, trace in traces.items():
        if not any(re.search(trace.finding, finding) for finding in mutated[hazard]):
            missed[hazard] = (trace.finding, mutated[hazard])
        if any(re.search(trace.finding, finding) for finding in sound[trace.scenario]):
            false[hazard] = sound[trace.scenario]
    seen = len(TRACED) - len(missed) - len(trees.moved.keys() & traces.keys())
    record_property("counted", f"audit: found {seen} of {len(TRACED)} mutants that leave a trace (of {len(MUTANTS)})")
    assert missed == {}
    assert false == {}
    assert len(traces) == len(TRACED)
