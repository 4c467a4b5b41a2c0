"""A run of no rollouts measures what it was given, once, and trains and saves nothing."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import lines
from tests.workers.gang_processes import run_gang


def test_a_run_of_no_rollouts_is_one_evaluation(tmp_path: Path) -> None:
    changes = {
        "loop": {"num_rollout": 0},
        "checkpoint": {"save_interval": 1},
        "eval": {
            "interval": 1,
            "data": {"generator": "largest_digit"},
            "max_prompts": 4,
            "sampling": {"temperature": 0.0, "max_response_len": 4},
        },
    }
    (did,) = run_gang("tests.e2e.resume_jobs:evaluated_only", 1, (tmp_path, changes), time_limit_s=240.0)
    (evaluation,) = lines(tmp_path / "eval.jsonl")
    assert (evaluation["step"], evaluation["eval/version"], evaluation["eval/failed"]) == (0, 0, 0)
    assert did.trained == []
    assert did.steps == []
    assert not (tmp_path / "checkpoints").exists()
