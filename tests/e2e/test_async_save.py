"""Saves in the background of whole runs: killed in the middle of one, the same command goes on from the one before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from state import checkpoints
from tests.e2e.conftest import BASE, Base
from tests.e2e.runs import Place, alive, descendants, journal, lines, marker, merged, until, without_rays_agents
from tests.workers.gang_processes import GangFailed, run_gang

JOBS = "tests.e2e.async_save_jobs"
ROLLOUTS = 3


def changes(**checkpoint: Any) -> dict[str, Any]:
    return {
        "loop": {"num_rollout": ROLLOUTS},
        "train": {"lr_decay_style": "cosine", "num_steps_per_rollout": 2},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4},
        "checkpoint": {"save_interval": 1, "keep": 2, **checkpoint},
    }


def test_killed_while_it_writes_and_trains_it_continues_from_the_save_before(tmp_path: Path) -> None:
    sync, run_dir, background = tmp_path / "sync", tmp_path / "killed", changes(async_save=True)
    with pytest.raises(GangFailed, match="exit code -9"):
        run_gang(f"{JOBS}:killed_while_writing", 1, (run_dir, background, 1), time_limit_s=120.0)

    left = checkpoints.inspect(run_dir / "checkpoints")
    assert left.tracker == "0\n"
    assert [one.iteration for one in left.incomplete] == [1]
    assert any(path.stat().st_size for path in (run_dir / "checkpoints/iter_0000001").glob("*.distcp"))
    assert [entry["rollout_id"] for entry in journal(run_dir, "driver", "trained")] == [0, 1, 2]

    args = (run_dir, background, sync, changes(save_interval=ROLLOUTS))
    ((uncut, rest, found),) = run_gang(f"{JOBS}:continued", 1, args, time_limit_s=120.0)
    assert rest.did.plan.start_rollout_id == 1
    assert rest.did.jumps == []
    assert rest.did.trained == [one for one in uncut.did.trained if one[0] >= 1]
    assert rest.final == uncut.final
    assert found == []


def hold(worker: Any) -> None:
    """A `train.setup_hook`: rank 1 does not finish its second write in the background while the file at HOLD stands."""
    from tests.e2e.async_save_jobs import hold_second_write

    if worker._spec.worker.rank == 1:
        hold_second_write(Path(worker._spec.run_dir) / "HOLD")


@pytest.mark.prove
def test_sigkill_of_a_real_run_in_the_middle_of_a_background_save_and_the_same_command_again(
    base: Base, place: Place
) -> None:
    """Rank 1 hangs in the write of iteration 1, and the gang has trained on, when everything is killed."""
    run_dir = place.path / "held"
    held = merged(BASE, {"checkpoint": {"async_save": True}, "train": {"setup_hook": f"{__name__}:hold"}})
    run_dir.mkdir()
    (run_dir / "HOLD").touch()
    process = place.start("train", place.config("held", held))
    metrics = run_dir / "metrics.jsonl"
    until(lambda: metrics.exists() and len(lines(metrics)) >= 3, "training past the save that hangs")
    assert [entry["iteration"] for entry in journal(run_dir, "driver", "save_begun")][:2] == [0, 1]
    assert [entry["iteration"] for entry in journal(run_dir, "driver", "save")] == [0]
    family = without_rays_agents(descendants(process.pid))
    process.kill()
    process.wait()
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)
    left = checkpoints.inspect(run_dir / "checkpoints")
    assert (left.ours, [one.iteration for one in left.incomplete]) == ((0,), [1])
    os.unlink(run_dir / "HOLD")

    place.train("held", held)

    assert journal(run_dir, "driver", "gang_started")[-1]["resume"]["start_rollout_id"] == 1
    assert marker(run_dir / "checkpoints", 3)["digest"] == marker(base.checkpoints, 3)["digest"]
    assert [entry["step"] for entry in lines(metrics)] == [0, 1, 2, 3]
    assert place.run("audit", run_dir).code == 0


def fill_the_disk(worker: Any) -> None:
    """A `train.setup_hook`: rank 1 cannot write its second copy."""
    from tests.e2e.async_save_jobs import refuse_second_write

    if worker._spec.worker.rank == 1:
        refuse_second_write()


@pytest.mark.prove
def test_a_rank_that_cannot_write_ends_the_run_by_name_and_the_checkpoint_before_stands(place: Place) -> None:
    hook = {"setup_hook": f"{__name__}:fill_the_disk"}
    once = {"checkpoint": {"async_save": True}, "cluster": {"max_gang_restarts": 0}, "train": hook}
    full = merged(BASE, once)
    ended = place.train("full", full, code=5)
    assert "actor/1 failed to write to disk" in ended.output
    assert "could not write save-1-1: OSError: [Errno 28] No space left on device" in ended.output
    left = checkpoints.inspect(place.path / "full" / "checkpoints")
    assert (left.tracker, left.ours, [one.iteration for one in left.incomplete]) == ("0\n", (0,), [1])
    assert place.run("audit", place.path / "full").code == 0
