"""The functions that docs/extending.md shows do what it says they do."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from orchestrator.rollouts.buffer import Rollout
from orchestrator.rollouts.pipeline import RolloutPipeline
from tests.orchestrator.rollouts.test_pipeline import WEIGHTS, Shown, StandInEngines, configuration, result
from workers.batch import Prompt, Sample

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BATCH = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "timeout_s": 20.0, "max_response_len": 8}


END, RIGHT = 1, 2
WORDS = Tokenizer(WordLevel({"?": 0, "<end>": END, "7": RIGHT, "+": 3, "=": 4, "Are": 5, "you": 6}, unk_token="?"))
WORDS.pre_tokenizer = WhitespaceSplit()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WORDS, eos_token="<end>")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All code of the page, as a module of the user's."""
    name = "code_of_the_page"
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / f"{name}.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def rollout(module: str, **options: object) -> Rollout:
    config = configuration(
        data={"generator": f"{module}:sums"}, reward={"name": f"{module}:brief"}, rollout=BATCH | options
    )
    engines = StandInEngines(["one"], lambda _, request: result(request, (RIGHT, END)))
    made = RolloutPipeline(config, TOKENIZER, engines, Shown())
    return asyncio.run(asyncio.wait_for(made.generate(0, WEIGHTS), 20))


def test_prompts_and_rewards_are_those_of_the_page(module: str) -> None:
    made = rollout(module)
    assert [sample.prompt_ids[1] for sample in made.samples] == [3] * 4, "one number + another"
    assert [sample.reward for sample in made.samples] == [pytest.approx(-0.02)] * 4
    judge = importlib.import_module(module).brief
    assert judge(Prompt(0, (3,), "3 + 4 =", "7"), "7", (RIGHT, END), made.samples[0]) == pytest.approx(0.98)


def test_a_filter_sees_the_rewards_of_a_group(module: str) -> None:
    keep = importlib.import_module(module).neither_hopeless_nor_solved
    prompt = Prompt(0, (3,), "")

    def group(*rewards: float | None) -> list[Sample]:
        return [
            Sample(0, i, (3,), (4,), (-1.0,), (1,), (WEIGHTS,), i, "stop", reward) for i, reward in enumerate(rewards)
        ]

    assert keep(prompt, group(0.0, 1.0))
    assert not keep(prompt, group(0.0, 0.0))
    assert not keep(prompt, group(1.0, 1.0))
    assert not keep(prompt, group(None, None))
    assert rollout(module, filter=f"{module}:neither_hopeless_nor_solved").stats["filter/refused"] > 0


def test_a_second_turn_is_trained_on_where_the_engine_wrote(module: str) -> None:
    for sample in rollout(module, generate=f"{module}:think_twice").samples:
        assert sample.response_ids == (RIGHT, END, 5, 6, 0, RIGHT, END)
        assert sample.loss_mask == (1, 1, 0, 0, 0, 1, 1)
