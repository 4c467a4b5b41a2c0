"""What mutants are run through is sound by itself: no scenario shows what it is there to show of one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from state.audit import audit
from tests.prove.every_mutant import MUTANTS
from tests.prove.mutant import Trace

TRACES = [m.trace for m in MUTANTS if isinstance(m.trace, Trace)]
NAMES = sorted(
    {trace.scenario for trace in TRACES} - {"scenarios:behaviour_policies"}
)  # this one is test_behaviour_policy.py


@pytest.mark.parametrize("name", NAMES)
def test_without_a_mutant_there_is_none_of_its_findings(name: str, tmp_path: Path) -> None:
    module, _, function = name.partition(":")
    getattr(importlib.import_module(f"tests.prove.{module}"), function)(tmp_path)
    report = audit(tmp_path)
    assert report.driver.starts
    for trace in TRACES:
        if trace.scenario == name:
            assert not [f for f in report.findings if re.search(trace.finding, str(f))]


def test_every_mutant_leaves_a_trace_or_says_why_not() -> None:
    without = [m.trace for m in MUTANTS if isinstance(m.trace, str)]
    assert len(without) + len(TRACES) == len(MUTANTS)
    assert all(len(reason.split()) >= 6 for reason in without)
    assert len({m.hazard for m in MUTANTS}) == len(MUTANTS)
