"""What the process of test_debug_runs.py does: a run that saves its rollouts, then halves of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.loops import train_loop
from orchestrator.resume import resuming
from orchestrator.rollouts.saved import SavedRollouts
from orchestrator.running.debug_runs import ReplayMismatch, ReplayRun, RolloutOnlyRun
from orchestrator.running.gang_specs import worker_specs
from orchestrator.running.interrupts import Stop
from orchestrator.running.run_dir import RunDir, config_hash
from orchestrator.tracking.jsonl import JsonlTracker
from state.audit import audit
from state.gang import GangId
from tests.e2e.in_process_run import Engines, FromRank, Gang, Gangs, Manager, Publisher, Trained, configuration, go
from tests.e2e.runs import lines, marker, merged
from tests.workers.gang_processes import Place
from workers.megatron import parallel
from workers.rollout.embedded import EmbeddedEngine

ROLLOUTS = 3
Changes = dict[str, Any]


@dataclass(frozen=True)
class Half:
    """What a run did: samples trained, `metrics.jsonl`, digests in the last checkpoint, requests to engines."""

    trained: list[Trained]
    steps: list[dict[str, Any]]
    final: dict[str, str] | None
    requests: int
    findings: list[str]


def halves(place: Place, root: Path, base: Changes) -> dict[str, Half | str]:
    saving = merged(base, {"debug": {"save_rollouts": str(root / "saved")}, "checkpoint": {"save_interval": 1}})
    whole = go(root / "whole", saving)
    found: dict[str, Half | str] = {
        "whole": Half(
            whole.trained,
            whole.steps,
            marker(root / "whole" / "checkpoints", ROLLOUTS - 1)["tensors"],
            whole.requests,
            [],
        )
    }
    replay = merged(base, {"debug": {"load_rollouts": str(root / "saved")}, "checkpoint": {"save_interval": 1}})
    found["replay"] = half(root / "replay", replay)
    faster = merged(replay, {"train": {"lr": 0.1}})
    try:
        half(root / "faster", faster)
    except ReplayMismatch as error:
        found["another learning rate"] = str(error)
    found["recorded log-probs"] = half(root / "recorded", merged(faster, {"algorithm": {"old_logprobs": "engine"}}))
    only = merged(base, {"debug": {"rollout_only": True, "save_rollouts": str(root / "only")}})
    found["rollout only"] = half(root / "rollout-only", only)
    return found


def half(run_dir: Path, changes: Mapping[str, Any]) -> Half:
    config = configuration(run_dir, changes)
    plan = resuming.plan(config)
    directory = RunDir.open(config, plan)
    steps = JsonlTracker(run_dir / "metrics.jsonl", plan.start_rollout_id)
    gang_id = GangId(1, directory.incarnation, config_hash(config))
    (spec,) = worker_specs(config, plan, gang_id, str(run_dir), "127.0.0.1")
    gang = Gang(spec)
    anyone: Any = Gangs(gang, None)
    told: Any = (steps, steps, Stop(0.0), {})
    requests = 0
    try:
        directory.gang_started(gang_id, plan)
        if config.debug.rollout_only:
            engine = EmbeddedEngine("engine", config.model, FromRank(gang.rank))
            engines = Engines(engine)
            manager: Any = Manager(config, engines, plan, run_dir)
            publisher: Any = Publisher(gang, engine, manager)
            train_loop(RolloutOnlyRun(config, directory, anyone, manager, publisher, *told), config, 0)
            requests = engines.requests
        else:
            saved = SavedRollouts(config, 0, None, put=lambda shard: shard)
            train_loop(ReplayRun(config, directory, anyone, saved, *told), config, 0)
    finally:
        steps.close()
        parallel.shutdown()
    final = marker(run_dir / "checkpoints", ROLLOUTS - 1)["tensors"] if config.checkpoint.save_interval else None
    # Publishes go through no driver and no fleet here, and so are in the journals of ranks alone.
    findings = [str(finding) for finding in audit(run_dir).findings if "publish" not in finding.what]
    return Half(gang.trained, lines(run_dir / "metrics.jsonl"), final, requests, findings)
