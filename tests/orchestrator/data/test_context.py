"""Prompts fit into the model's context beside a response, or are said not to before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from orchestrator.config import Config, DataConfig
from orchestrator.data.context import context_len, problems, prompt_limit
from orchestrator.data.source import DataSource
from tests.orchestrator.valid_config import VALID
from workers.config import ModelConfig, SamplingConfig

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "examples" / "quickstart")


def model(positions: int | None) -> ModelConfig:
    return ModelConfig(
        config={"model_type": "qwen3"} | ({} if positions is None else {"max_position_embeddings": positions})
    )


def config(prompt: int | None, response: int, positions: int = 64, **sections: object) -> Config:
    value = yaml.safe_load(VALID)
    value["model"]["config"]["max_position_embeddings"] = positions
    value["rollout"]["max_response_len"] = response
    value["data"]["max_prompt_len"] = prompt
    return Config.model_validate(value | sections)


def test_a_limit_that_is_not_given_is_what_the_context_leaves_up_to_the_usual_one() -> None:
    data, sampling = DataConfig(), SamplingConfig(max_response_len=16)
    assert prompt_limit(model(64), data, sampling) == 48
    assert prompt_limit(model(1 << 17), data, sampling) == 1024
    assert prompt_limit(model(None), data, sampling) == 1024
    assert prompt_limit(model(64), DataConfig(max_prompt_len=7), sampling) == 7


@pytest.mark.parametrize(("length", "taken"), [(47, True), (48, True), (49, False)])
def test_a_prompt_that_leaves_a_whole_response_is_taken_and_one_token_more_is_not(
    tmp_path: Path, length: int, taken: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "1"}) + "\n" + json.dumps({"prompt": " ".join("1" * length)})
    )
    limit = prompt_limit(model(64), DataConfig(), SamplingConfig(max_response_len=16))
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), shuffle=False, max_prompt_len=limit)
    source = DataSource(data, TOKENIZER, 0)
    source.next(2)
    assert source.cursor.left_out == (0 if taken else 1)


def test_the_context_stands_in_the_hugging_face_directory_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert context_len(ModelConfig(hf_checkpoint=str(tmp_path))) == 77
    assert context_len(ModelConfig(hf_checkpoint=str(tmp_path / "on-another-machine"))) is None


def test_lengths_that_exceed_the_context_are_said_with_what_would_fit() -> None:
    assert list(problems(config(48, 16))) == []
    (found,) = problems(config(49, 16))
    assert found.key == "data.max_prompt_len"
    assert "49 + rollout.max_response_len 16 exceed" in found.message
    assert "use at most 48" in found.message
    (found,) = problems(config(None, 64))
    assert found.key == "rollout.max_response_len"
    assert "use at most 63" in found.message


def test_evaluation_has_lengths_of_its_own() -> None:
    evaluation = {
        "interval": 1,
        "data": {"generator": "largest_digit", "max_prompt_len": 50},
        "sampling": {"max_response_len": 20},
    }
    assert [problem.key for problem in problems(config(8, 16, eval=evaluation))] == ["eval.data.max_prompt_len"]
