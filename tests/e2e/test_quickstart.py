"""The main job of the README, as it stands there."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from tests.e2e.runs import REPO, Ended, Place, alive, descendants, lines, until

REPORTED = (
    "step",
    "reward/mean",
    "train/loss",
    "train/kl_loss",
    "train/grad_norm",
    "train/entropy",
    "train/lr",
    "weights/version",
    "rollout/train_engine_logprob_diff",
    "perf/step_s",
    "perf/publish_s",
    "perf/verify_s",
    "perf/borrow_s",
)
EXAMPLE = REPO / "examples" / "quickstart.yaml"


def timed(place: Place, *arguments: str | Path) -> tuple[Ended, float]:
    began = time.monotonic()
    return place.run(*arguments), time.monotonic() - began


def test_it_learns_shows_its_slots_and_leaves_nothing_behind(place: Place) -> None:
    run_dir = place.path / "quickstart"
    process = place.start("train", EXAMPLE, "--run.dir", run_dir)
    until(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir / "metrics.jsonl"), "a first rollout")
    family = descendants(process.pid)

    asked = [timed(place, "slots", "--run", run_dir, "--json") for _ in range(3)]

    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    view = json.loads(asked[0][0].output)
    assert view["source"] == "live"
    assert [row["rank"] for row in view["workers"]] == [0, 1]
    assert {row["slot"] for row in view["workers"]} <= {"actor", "ref", None}
    assert len(view["engines"]) == 2
    assert min(took for _, took in asked) < 2.0
    steps = lines(run_dir / "metrics.jsonl")
    assert [entry["step"] for entry in steps] == list(range(len(steps)))
    for entry in steps:
        assert all(math.isfinite(entry[name]) for name in REPORTED)
        assert entry["rollout/train_engine_logprob_diff"] < 1e-5
        assert entry["weights/version"] == entry["step"] + 1
    assert steps[0]["reward/mean"] < 0.2
    assert steps[-1]["reward/mean"] >= 0.9
    assert "slotwise slots" in output
    assert "slotwise audit" in output
    assert place.run("audit", run_dir).code == 0
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)


@pytest.mark.prove
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_learn_as_well(place: Place, seed: int) -> None:
    run_dir = place.path / "quickstart"
    ended = place.run("train", EXAMPLE, "--run.dir", run_dir, "--run.seed", str(seed), timeout_s=300)
    assert ended.code == 0, ended.output
    steps = lines(run_dir / "metrics.jsonl")
    assert steps[0]["reward/mean"] < 0.2
    assert steps[-1]["reward/mean"] >= 0.9


@pytest.mark.prove
def test_it_learns_as_well_with_a_critic(place: Place) -> None:
    run_dir = place.path / "quickstart"
    flags = ("--algorithm.advantage_estimator", "ppo", "--algorithm.normalize_advantages", "--critic.lr", "3e-3")
    ended = place.run("train", EXAMPLE, "--run.dir", run_dir, *flags, timeout_s=600)
    assert ended.code == 0, ended.output
    steps = lines(run_dir / "metrics.jsonl")
    assert steps[0]["reward/mean"] < 0.2
    assert steps[-1]["reward/mean"] >= 0.9
    assert steps[-1]["critic/explained_variance"] > 0.1
    assert place.run("audit", run_dir).code == 0
