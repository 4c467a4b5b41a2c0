"""A real run whose engines generate beside training: in one go, and asked to end in the middle and continued."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Place, journal, lines, until

ROLLOUTS, BATCH, SAMPLES, BOUND = 8, 3, 2, 2
FULLY_ASYNC: dict[str, Any] = {
    "loop": {"mode": "fully_async", "num_rollout": ROLLOUTS, "max_staleness": BOUND},
    "algorithm": {"old_logprobs": "engine"},
    "train": {"num_workers": 1},
    # Long responses in small calls, so that every publish cuts some of them off.
    "rollout": {
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": SAMPLES,
        "max_response_len": 48,
        "requests_per_call": SAMPLES,
    },
    "checkpoint": {"save_interval": ROLLOUTS},
}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.prove)], ids=["in one go", "continued"])
def starts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def run_dir(starts: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Place(tmp_path_factory.mktemp("fully_async"))
    run_dir = place.path / "run"
    asked = FULLY_ASYNC | {"debug": {"save_rollouts": str(place.path / "rollouts")}}
    if starts == 2:
        process = place.start("train", place.config("run", asked))
        until(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir / "metrics.jsonl"), "a first rollout")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 130, output
    place.train("run", asked)
    return run_dir


def samples(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """By rollout, what was trained on."""
    files = sorted((run_dir.parent / "rollouts").glob("rollout_*.json"))
    return {number: json.loads(file.read_text())["samples"] for number, file in enumerate(files)}


def test_no_prompt_is_lost_and_none_is_trained_on_twice(run_dir: Path, starts: int) -> None:
    counted = Counter(sample["group_id"] for part in samples(run_dir).values() for sample in part)
    assert counted == dict.fromkeys(range(ROLLOUTS * BATCH), SAMPLES)
    assert [step["step"] for step in lines(run_dir / "metrics.jsonl")] == list(range(ROLLOUTS))
    assert {entry["incarnation"] for entry in journal(run_dir, "driver", "trained")} == set(range(1, starts + 1))


def test_nothing_is_staler_than_the_bound(run_dir: Path) -> None:
    steps = lines(run_dir / "metrics.jsonl")
    for rollout_id, part in samples(run_dir).items():
        most = max(rollout_id - version for sample in part for _, version in sample["versions"])
        assert most == steps[rollout_id]["rollout/staleness_max"] <= BOUND
    assert max(step["rollout/staleness_max"] for step in steps) > 0


def test_responses_go_on_through_publishes(run_dir: Path) -> None:
    mixed = [sample for part in samples(run_dir).values() for sample in part if len(sample["versions"]) > 1]
    assert mixed
    for sample in mixed:
        assert sample["versions"] == sorted(sample["versions"])
        assert len(sample["response_ids"]) == len(sample["logprobs"]) <= 48


def test_the_journals_hold_what_they_must(run_dir: Path) -> None:
    assert Place(run_dir.parent).run("audit", run_dir).code == 0
