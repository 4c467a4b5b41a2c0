"""How many rollouts `loop.num_epoch` is, and that all that depends on it is computed from that."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from orchestrator.batching import steps_per_rollout, total_steps
from orchestrator.cli import main
from orchestrator.config import Config, DataConfig
from orchestrator.data import horizon
from orchestrator.data.source import DataSource
from orchestrator.exit_codes import ExitCode
from orchestrator.resume.resuming import plan
from orchestrator.running.gang_specs import worker_specs
from state.gang import GangId
from tests.e2e.runs import TINY, merged
from tests.orchestrator.valid_config import write

TOKENIZER = str(TINY["model"]["tokenizer"])


def rows(path: Path, usable: int, too_long: int = 0) -> str:
    """Prompts of two tokens, among them some of nine."""
    prompts = ["1 2 3 4 5 6 7 8 9"] * too_long + [f"{i % 10} {i // 10}" for i in range(usable)]
    path.write_text("".join(json.dumps({"prompt": prompt, "label": "1"}) + "\n" for prompt in prompts))
    return str(path)


@pytest.mark.parametrize(
    ("num_epoch", "prompts", "batch", "expected"),
    [(1, 8, 8, 1), (3, 8, 4, 6), (3, 7, 3, 7), (1, 7, 3, 3), (2, 1, 8, 1), (1, 1, 1, 1), (5, 4, 8, 3)],
)
def test_epochs_follow_one_another_without_a_gap(num_epoch: int, prompts: int, batch: int, expected: int) -> None:
    assert horizon.rollouts(num_epoch, prompts, batch) == expected


@pytest.mark.parametrize(("num_epoch", "usable", "batch"), [(1, 5, 3), (3, 5, 3), (2, 6, 3), (3, 2, 7)])
def test_they_are_the_least_in_which_every_prompt_comes_so_often(
    tmp_path: Path, num_epoch: int, usable: int, batch: int
) -> None:
    config = DataConfig(path=rows(tmp_path / "rows.jsonl", usable, too_long=2), max_prompt_len=4)
    source = DataSource(config, AutoTokenizer.from_pretrained(TOKENIZER), 0)
    needed = horizon.rollouts(num_epoch, source.usable_per_epoch(), batch)
    before = Counter(prompt.text for _ in range(needed - 1) for prompt in source.next(batch))
    assert min(before.values(), default=0) < num_epoch or len(before) < usable
    after = before + Counter(prompt.text for prompt in source.next(batch))
    assert len(after) == usable
    assert min(after.values()) >= num_epoch


def test_the_learning_rate_decays_over_exactly_the_steps_of_these_epochs(tmp_path: Path) -> None:
    """The schedule is built from rollouts that were counted, after over-long prompts were left out."""
    changes = {
        "run": {"dir": str(tmp_path / "run")},
        "loop": {"num_rollout": None, "num_epoch": 5},
        "data": {"generator": None, "path": rows(tmp_path / "rows.jsonl", 12, too_long=5), "max_prompt_len": 4},
        "rollout": {"rollout_batch_size": 4},
        "train": {"num_steps_per_rollout": 2},
    }
    config = Config.model_validate(merged(TINY, changes))
    with pytest.raises(ValueError, match=r"loop\.num_epoch is 5"):
        total_steps(config)
    settled = horizon.settled(config)
    rollouts_per_epoch = 12 // 4
    assert total_steps(settled) == 5 * rollouts_per_epoch * steps_per_rollout(settled) == 30
    specs = worker_specs(settled, plan(settled), GangId(2, 1, "0"), str(tmp_path), None)
    assert {spec.total_steps for spec in specs} == {30}


def test_a_number_of_rollouts_is_left_as_it_is() -> None:
    config = Config.model_validate(TINY)
    assert horizon.settled(config) is config


def dry_run(directory: Path, *flags: str) -> int:
    tokenizer = ("--model.tokenizer", TOKENIZER)
    return main(["train", str(write(directory)), *tokenizer, "--dry-run", "--json", *flags])


def test_a_dry_run_says_how_many_rollouts_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "rows.jsonl", 7)
    epochs = ("--loop.num_rollout", "null", "--loop.num_epoch", "3", "--rollout.rollout_batch_size", "3")
    data = ("--data.generator", "null", "--data.path", "rows.jsonl")
    assert dry_run(tmp_path, *epochs, *data) == ExitCode.DONE
    said = capsys.readouterr()
    assert (
        json.loads(said.out)["config"]["loop"] | {"num_rollout": 7, "num_epoch": None}
        == (json.loads(said.out)["config"]["loop"])
    )
    assert "loop.num_epoch 3 of rows.jsonl: 7 rollouts" in said.err
    assert dry_run(tmp_path, *epochs, *data, "--train.lr_warmup_steps", "14") == ExitCode.CONFIG
    assert "the run has 14 (num_rollout 7 x 2 steps per rollout)" in capsys.readouterr().err
    critic = ("--algorithm.advantage_estimator", "ppo", "--critic.lr_warmup_steps")
    assert dry_run(tmp_path, *epochs, *data, *critic, "13") == ExitCode.DONE
    capsys.readouterr()
    assert dry_run(tmp_path, *epochs, *data, *critic, "14") == ExitCode.CONFIG
    assert "critic.lr_warmup_steps" in capsys.readouterr().err
    assert dry_run(tmp_path, *epochs, *data, "--data.max_prompt_len", "1") == ExitCode.CONFIG
    assert "data.path (--data.path): loop.num_epoch cannot be counted: no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (("--loop.num_epoch", "3"), "loop.num_epoch", "give this or loop.num_rollout, not both"),
        (("--loop.num_rollout", "null"), "loop.num_rollout", "Give this, or loop.num_epoch"),
        (
            ("--loop.num_rollout", "null", "--loop.num_epoch", "3"),
            "loop.num_epoch",
            "data.generator largest_digit has no end, so there are no epochs of it; give loop.num_rollout",
        ),
    ],
)
def test_a_length_that_nobody_can_know_is_refused_with_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], key: str, words: str
) -> None:
    assert dry_run(tmp_path, *flags) == ExitCode.CONFIG
    said = capsys.readouterr()
    (problem,) = json.loads(said.out)["problems"]
    assert problem["key"] == key
    assert words in problem["message"]
