"""However a run ends during or after a rebuild of its gang, nothing of it is left."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import Place, alive, descendants, journal, merged, until, without_rays_agents
from tests.faults.hooks import ENVIRONMENT, RANK_HOOK, Fault, write

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

SAVED = {"loop": {"num_rollout": 1000}, "checkpoint": {"save_interval": 1, "keep": 2}}
WHILE_REBUILDING, AFTERWARDS = ("gang_rebuild", 2), ("gang_started", 2)


@pytest.mark.parametrize(
    ("when", "how", "code"),
    [
        (WHILE_REBUILDING, signal.SIGTERM, 130),
        (AFTERWARDS, signal.SIGTERM, 130),
        (AFTERWARDS, signal.SIGINT, 130),
        (AFTERWARDS, signal.SIGKILL, -9),
    ],
    ids=["SIGTERM while it rebuilds", "SIGTERM", "SIGINT", "SIGKILL"],
)
def test_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: tuple[str, int], how: signal.Signals, code: int
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "faults.json"))
    write([Fault("actor/1", "step", "after", "kill", nth=2)], tmp_path / "faults.json")
    place, run_dir = Place(tmp_path), tmp_path / "ended"
    kind, incarnation = when
    process = place.start("train", place.config("ended", merged(SAVED, {"train": {"setup_hook": RANK_HOOK}})))
    family: set[psutil.Process] = set()

    def reached() -> bool:
        family.update(descendants(process.pid))
        there = (run_dir / "journal" / "driver.jsonl").exists() and journal(run_dir, "driver", kind)
        return bool(there) and there[-1]["incarnation"] == incarnation

    until(reached, f"{kind} of incarnation {incarnation}", timeout_s=400)
    process.send_signal(how)
    output, _ = process.communicate(timeout=120)

    assert process.returncode == code, output
    left = without_rays_agents(list(family))
    until(lambda: not alive(left), "every process that the run had started is gone", timeout_s=20)
    audit = place.run("audit", run_dir)
    assert audit.code == 0, audit.output
