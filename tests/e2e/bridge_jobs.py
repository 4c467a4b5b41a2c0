"""What the process of test_bridge.py does: a run from a Hugging Face directory, cut and continued; and what ranks hold
that begin with such a directory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.resume import resuming
from orchestrator.running.gang_specs import worker_specs
from state.audit import audit
from state.gang import GangId
from tests.e2e.in_process_run import Gang, Outcome, configuration, go
from tests.workers.gang_processes import Place
from workers.megatron import parallel

ROLLOUTS = 4
CUT = 1


class Cut(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def from_directory(directory: Path) -> dict[str, Any]:
    return {
        "loop": {"num_rollout": ROLLOUTS},
        "model": {
            "config": None,
            "hf_checkpoint": str(directory),
            "megatron_to_hf_mode": "bridge",
            "dtype": "bfloat16",
        },
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4},
    }


def saving(root: Path) -> dict[str, Any]:
    """Exports after rollouts 2 and 3, checkpoints after 1 and 3."""
    exports = {"save_hf_interval": 3, "save_hf": str(root / "exported-{rollout_id}"), "save_interval": 2}
    return from_directory(root / "base") | {"checkpoint": exports}


def bridged(place: Place, root: Path) -> tuple[Outcome, dict[str, str], list[str]]:
    """What the continued run did, the digest of the actor that each directory gives, and what the audit found."""

    def cut(rollout_id: int) -> None:
        if rollout_id == CUT:
            raise Cut

    with suppress(Cut):
        go(root / "first", saving(root), after_save=cut)
    did = go(root / "first", saving(root))
    loaded = {name: loaded_from(root, name) for name in ("base", f"exported-{ROLLOUTS - 1}")}
    # Publishes go through no driver and no fleet here, and so are in the journals of ranks alone.
    found = [str(finding) for finding in audit(root / "first").findings if "publish" not in finding.what]
    return did, loaded, found


def loaded_from(root: Path, name: str) -> str:
    """The digest that a gang agrees on which begins with that directory."""
    config = configuration(root / f"from-{name}", from_directory(root / name))
    (spec,) = worker_specs(
        config, resuming.plan(config), GangId(1, 1, "config"), str(root / f"from-{name}"), "127.0.0.1"
    )
    try:
        return Gang(spec).agree("look").digest
    finally:
        parallel.shutdown()
