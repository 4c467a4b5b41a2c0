"""Engines are killed in a running fleet: training goes on while there are replacements, and ends with the reason."""

from __future__ import annotations

import pytest

from tests.e2e.runs import Place, journal, lines

DEADLY = {
    "loop": {"num_rollout": 6},
    "rollout": {"num_engines": 2, "max_engine_replacements": 3},
    "reward": {"name": "tests.e2e.deadly_rewards:training", "timeout_s": 90.0},
    "eval": {
        "interval": 1,
        "data": {"generator": "largest_digit"},
        "reward": {"name": "tests.e2e.deadly_rewards:evaluation", "timeout_s": 90.0},
        "max_prompts": 2,
        "sampling": {"temperature": 0.0, "max_response_len": 4},
    },
}


@pytest.mark.prove
def test_dead_engines_are_replaced_while_training_goes_on_until_the_budget_is_spent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = place.path / "deadly"
    monkeypatch.setenv("DEADLY_RUN_DIR", str(run_dir))
    ended = place.run("train", place.config("deadly", DEADLY), timeout_s=400)
    assert ended.code == 5, ended.output

    trained = [entry["step"] for entry in lines(run_dir / "metrics.jsonl")]
    assert trained == [0, 1, 2, 3]
    publishes = journal(run_dir, "driver", "publish")
    committed = [
        (p["version"], sorted(engine.rpartition("/")[2] for engine, verdict in p["engines"].items()))
        for p in publishes
        if p["outcome"] == "committed"
    ]
    assert committed[:4] == [(0, ["0", "1"]), (1, ["0", "1"]), (2, ["1"]), (3, ["1", "2"])]
    out_of_schedule = committed[4]
    assert out_of_schedule[0] == 3, "all engines died before rollout 3: those that replace them are published to again"
    assert set(out_of_schedule[1]) <= {"3", "4"}
    assert committed[5][0] == 4
    assert len(committed) == 6
    assert "no engine is alive" in ended.output
    assert "3 of at most 3 replaced" in ended.output
    assert place.run("audit", run_dir).code == 0
