"""The example with a tool, for real but small: turns of a real engine are trained on by a real rank."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.in_process_run import go
from tests.e2e.runs import REPO, lines, merged

SMALL = {
    "loop": {"num_rollout": 2},
    "train": {"num_workers": 1},
    "rollout": {"rollout_batch_size": 8, "num_engines": 1},
    "algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.0},
}


def test_turns_with_a_tool_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "examples" / "multi_turn"))
    example = yaml.safe_load((REPO / "examples" / "multi_turn.yaml").read_text())
    example["model"]["tokenizer"] = str(REPO / "examples" / "multi_turn")
    del example["run"]
    try:
        outcome = go(tmp_path / "run", merged(example, SMALL))
    finally:
        sys.modules.pop("calculator", None)

    assert len(outcome.trained) == 2 * 8 * 8
    assert outcome.requests > len(outcome.trained), "some samples took more than one turn"
    tool = 17
    assert any(tool in response for *_, response in outcome.trained)
    for step in outcome.steps:
        assert math.isfinite(step["train/loss"])
        assert step["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["rollout/prompts"] >= 8
    shown = [line["response"] for line in lines(tmp_path / "run" / "samples.jsonl")]
    assert shown
