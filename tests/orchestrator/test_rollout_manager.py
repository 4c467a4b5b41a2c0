"""The manager as an actor: engines start stale, and it answers while it cannot generate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.config import Config
from orchestrator.rollout_manager import ManagerSpec, RolloutManager, engine_row
from orchestrator.rollouts.engine_lanes import NoEngineServes
from state.engine_life import EnginePhase, EngineStatus
from state.slots import WeightId

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


def configuration() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "manager"},
            "model": {
                "tokenizer": str(ROOT / "examples" / "quickstart"),
                "dtype": "float32",
                "config": {
                    "model_type": "qwen3",
                    "vocab_size": 16,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 8,
                    "eos_token_id": 1,
                    "pad_token_id": 0,
                },
            },
            "data": {"generator": "largest_digit"},
            "reward": {"name": "largest_digit"},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "cpus_per_engine": 0.25},
        }
    )


def test_a_manager_starts_answers_and_ends_its_engines(cluster: None, tmp_path: Path) -> None:
    spec = ManagerSpec(configuration(), str(tmp_path), ({},))
    manager: Any = RolloutManager.options(num_cpus=0).remote(spec)  # type: ignore[attr-defined]
    assert ray.get(manager.start.remote(), timeout=LIMIT_S) == ("manager/engine/0",)
    ray.get(manager.begin.remote(0, None), timeout=LIMIT_S)

    (row,) = ray.get(manager.engine_rows.remote(), timeout=LIMIT_S)
    assert (row["state"], row["version"], row["behind_by"]) == ("stale", None, None)
    with pytest.raises(NoEngineServes, match=r"no engine serves weights 0\.0"):
        ray.get(manager.generate.remote(0, WeightId(0, 0)), timeout=LIMIT_S)

    state = ray.get(manager.data_state.remote(), timeout=LIMIT_S)
    assert state["waiting"] == []
    assert state["cursor"]["next_group_id"] == 0

    ray.get(manager.shutdown.remote(), timeout=LIMIT_S)
    (row,) = ray.get(manager.engine_rows.remote(), timeout=LIMIT_S)
    assert row["state"] == "dead"
    journal = [json.loads(line) for line in (tmp_path / "journal" / "fleet.jsonl").read_text().splitlines()]
    assert [entry["state"] for entry in journal] == ["stale", "dead"]


def test_a_row_says_how_far_an_engine_is_behind() -> None:
    serving = EngineStatus("e", EnginePhase.SERVING, weights=WeightId(1, 4), publish_id="p")
    assert engine_row(serving, WeightId(1, 6))["behind_by"] == 2
    assert engine_row(serving, WeightId(2, 6))["behind_by"] is None
    stale = engine_row(EngineStatus("e", EnginePhase.STALE, reason="never published to"), WeightId(1, 6))
    assert (stale["behind_by"], stale["version"], stale["reason"]) == (None, None, "never published to")
