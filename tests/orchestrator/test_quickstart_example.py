"""The example that people run first: valid, and consistent with its tokenizer."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from orchestrator.checks.configuration import problems
from orchestrator.config import Config
from orchestrator.data.source import DataSource

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def config() -> Config:
    return Config.model_validate(yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text()))


def test_it_has_no_problems(config: Config) -> None:
    assert problems(config) == ()


def test_model_and_tokenizer_agree(config: Config) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart")
    model: dict[str, Any] = config.model.config or {}
    assert config.model.tokenizer == "examples/quickstart"
    assert model["vocab_size"] == len(tokenizer)
    assert (model["eos_token_id"], model["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_prompts_fit_the_model_and_spell_out_three_digits(config: Config) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "quickstart")
    model: dict[str, Any] = config.model.config or {}
    for prompt in DataSource(config.data, tokenizer, config.run.seed).next(20):
        assert len(prompt.ids) + config.rollout.max_response_len <= model["max_position_embeddings"]
        assert tokenizer.convert_ids_to_tokens(list(prompt.ids)) == prompt.text.split()
        assert prompt.label in prompt.text.split()


def test_the_tokenizer_files_are_those_that_the_script_makes(tmp_path: Path) -> None:
    script = tmp_path / "make_tokenizer.py"
    script.write_text((EXAMPLES / "quickstart" / "make_tokenizer.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (EXAMPLES / "quickstart" / name).read_text()
