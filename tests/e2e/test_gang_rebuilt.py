"""A training rank fails in a running run: the gang is built anew, and the run ends with the weights of one that nothing
happened to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.slots_view import read
from tests.e2e.conftest import BASE, Base
from tests.e2e.runs import Place, alive, descendants, journal, lines, marker, merged, until, without_rays_agents
from tests.faults.hooks import ENGINE_HOOK, ENVIRONMENT, RANK_HOOK, Fault, write

HOOKED = {"train": {"setup_hook": RANK_HOOK}, "rollout": {"setup_hook": ENGINE_HOOK}}
SAVED_EACH = range(BASE["loop"]["num_rollout"])


def test_a_killed_rank_and_one_that_raises_cost_two_restarts_and_nothing_else(
    base: Base, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "faults.json"))
    write(
        [
            Fault("actor/1", "step", "after", "kill", nth=2, incarnation=1),
            Fault("actor/0", "bucket", "before", "raise", nth=2, incarnation=2),
        ],
        tmp_path / "faults.json",
    )
    run_dir = place.path / "rebuilt"

    process = place.start("train", place.config("rebuilt", merged(BASE, HOOKED)))
    seen: dict[int, set[str]] = {}
    family: set[psutil.Process] = set()

    def ended() -> bool:
        family.update(descendants(process.pid))
        for row in live_workers(run_dir):
            seen.setdefault(row["incarnation"], set()).add(row["worker"])
        return process.poll() is not None

    until(ended, "the run has ended", timeout_s=250.0)
    output = process.stdout.read() if process.stdout else ""

    assert process.returncode == 0, output
    assert "actor/1: ActorDiedError" in output
    assert "error: actor/0 failed to transfer the weights" in output
    assert "on purpose: 2. actor/0 raise before bucket 2" in output, "the traceback of the rank"
    assert "the gang is built anew (restart 2 of 3)" in output
    for iteration in SAVED_EACH:
        assert marker(run_dir / "checkpoints", iteration)["tensors"] == marker(base.checkpoints, iteration)["tensors"]
    assert [entry["step"] for entry in lines(run_dir / "metrics.jsonl")] == list(SAVED_EACH)
    failed = journal(run_dir, "driver", "gang_failed")
    assert [(entry["incarnation"], entry["rebuild"]) for entry in failed] == [(1, True), (2, True)]
    assert "actor/1" in failed[0]["ranks"]
    starts = journal(run_dir, "driver", "gang_started")
    assert [(e["incarnation"], e["resume"]["start_rollout_id"]) for e in starts] == [(1, 0), (2, 1), (3, 2)]
    assert json.loads((run_dir / "resume.json").read_text()) == starts[-1]["resume"]
    engines = {e["engine"] for e in journal(run_dir, "fleet", "engine")}
    assert engines == {"rebuilt/engine/0"}, "engines stay up"
    both = {"rebuilt/actor/0", "rebuilt/actor/1"}
    assert seen[1] == seen[2] == seen[3] == both, "the page follows the gang"
    left = without_rays_agents(list(family))
    until(lambda: not alive(left), "every process that the run had started is gone", timeout_s=60)
    audit = place.run("audit", run_dir)
    assert audit.code == 0, audit.output


def live_workers(run_dir: Path) -> list[dict[str, Any]]:
    """As the inspector answers."""
    if not (run_dir / "inspector.json").exists():
        return []
    view = read(run_dir)
    return [row for row in view["workers"] if row["state"] != "unreachable"] if view["source"] == "live" else []
