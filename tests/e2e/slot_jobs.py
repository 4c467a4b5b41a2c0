"""What the process of test_slots_in_real_runs.py does: runs with every slot, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from state.audit import audit
from tests.e2e.in_process_run import Outcome, go
from tests.e2e.runs import journal, marker
from tests.workers.gang_processes import Place
from workers.megatron.spec import WorkerSpec

ROLLOUTS = 6


class Cut(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@dataclass(frozen=True)
class Told:
    """What runs in one directory left behind. `entries`: the rank's journal, `saved`: marker by iteration."""

    last: Outcome
    entries: list[dict[str, Any]]
    saved: dict[int, dict[str, Any]]
    findings: list[str]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.last.steps


def run(root: Path, name: str, changes: Mapping[str, Any], cut_after: int | None = None) -> Told:
    """To the end; where there is a `cut_after`, first until it has saved that rollout, as if killed then."""

    def cut(rollout_id: int) -> None:
        if rollout_id == cut_after:
            raise Cut

    if cut_after is not None:
        with suppress(Cut):
            go(root / name, changes, after_save=cut)
    last = go(root / name, changes)
    saved = {}
    if "checkpoint" in changes:
        checkpoints = root / name / "checkpoints"
        saved = {i: marker(checkpoints, i) for i in range(ROLLOUTS) if (checkpoints / f"iter_{i:07d}").exists()}
    kinds = ("transition", "snapshot", "kept")
    entries = [entry for kind in kinds for entry in journal(root / name, "actor-0", kind)]
    # Publishes go through no driver and no fleet here, and so are in the journals of ranks alone.
    findings = [str(finding) for finding in audit(root / name).findings if "publish" not in finding.what]
    return Told(last, sorted(entries, key=lambda e: int(e["seq"])), saved, findings)


def several(place: Place, root: Path, asked: Mapping[str, tuple[Mapping[str, Any], int | None]]) -> dict[str, Told]:
    """By name: what to change, and where to cut."""
    return {name: run(root, name, changes, cut) for name, (changes, cut) in asked.items()}


def with_too_few_versions(place: Place, root: Path, changes: Mapping[str, Any]) -> str:
    """What a worker says that keeps fewer versions than samples in flight are of."""

    def forgetful(spec: WorkerSpec) -> WorkerSpec:
        return replace(spec, keep_old_actors=1)

    try:
        go(root / "few", changes, sabotage=forgetful)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
