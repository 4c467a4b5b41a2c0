"""The page shows what of a journal is whole, whatever else stands in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.inspector.history import History
from tests.state.journal_edits import entries, write
from tests.state.test_audit_damage import OTHER, changed
from tests.state.toy_run import kept_run


@pytest.mark.parametrize("name", ["driver", "fleet", "actor-1"])
def test_a_line_whose_fields_are_of_other_types_is_counted_and_passed_over(tmp_path: Path, name: str) -> None:
    kept_run(tmp_path)
    lines = entries(tmp_path, name)
    kinds = {(line["kind"], line.get("trigger")): line for line in lines}
    values = iter(OTHER * 1000)
    write(tmp_path, name, [*lines, *(one for line in kinds.values() for one in changed(line, values))], renumber=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": "x"}\n' + "[" * 9999 + '\n{"step": []}\n')
    history = History(tmp_path)
    history.refresh()
    assert history.damaged[f"{name}.jsonl"] > len(kinds)
    assert history.metrics[0]["reward/mean"] is None
    rows = [lane.row() for lane in history.lanes]
    told = [lane.tell(index) for lane in history.lanes for index in range(len(lane.times))]
    json.dumps([rows, told, history.publishes, history.saves, history.problems, history.status(), history.name])
