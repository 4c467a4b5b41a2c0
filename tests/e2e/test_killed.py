"""A run that is killed continues with the same command, to the same weights; nothing is left behind."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.conftest import BASE, Base
from tests.e2e.runs import Place, alive, descendants, journal, lines, marker, until, without_rays_agents


def test_sigkill_of_the_driver_and_the_same_command_again(base: Base, place: Place) -> None:
    run_dir = place.path / "killed"
    process = place.start("train", place.config("killed", BASE))
    until(lambda: (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").exists(), "a first checkpoint")
    family = without_rays_agents(descendants(process.pid))
    process.kill()
    process.wait()
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "reward/me')  # as a kill in the middle of a write leaves it

    place.train("killed", BASE)

    assert marker(run_dir / "checkpoints", 3)["digest"] == marker(base.checkpoints, 3)["digest"]
    assert [entry["step"] for entry in lines(run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
    again = journal(run_dir, "driver", "gang_started")[-1]
    assert again["resume"]["source"] == "native"
    assert again["incarnation"] == 2
    assert place.run("audit", run_dir).code == 0


@pytest.mark.parametrize("asked", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.prove)])
def test_asked_to_end_it_ends_whole(place: Place, asked: signal.Signals) -> None:
    process = place.start("train", place.config("asked", {"loop": {"num_rollout": 1000}, "train": {"num_workers": 1}}))
    until(lambda: (place.path / "asked" / "metrics.jsonl").exists(), "the run directory")
    until(lambda: (place.path / "asked" / "metrics.jsonl").read_text(), "a first rollout")
    family = descendants(process.pid)
    process.send_signal(asked)

    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)
    assert journal(place.path / "asked", "driver", "run_ended")[-1]["outcome"] == "failed"


def test_asked_to_end_by_sigterm_it_saves_first_and_the_same_command_continues(place: Place) -> None:
    run_dir = place.path / "stopped"
    config = place.config("stopped", {"loop": {"num_rollout": 1000}, "checkpoint": {"save_interval": 1000}})
    process = place.start("train", config)
    until(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir / "metrics.jsonl"), "a first rollout")
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)

    output, _ = process.communicate(timeout=150)

    assert process.returncode == 130, output
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)
    last = lines(run_dir / "metrics.jsonl")[-1]["step"]
    assert f"saved as iter_{last:07d}" in output
    assert f"the same command goes on with rollout {last + 2}/1000" in output
    assert marker(run_dir / "checkpoints", last)["version"] == last + 1
    dry = place.run("train", config, "--dry-run", "--json")
    assert json.loads(dry.output.splitlines()[-1])["resume"]["start_rollout_id"] == last + 1
    assert place.run("audit", run_dir).code == 0
