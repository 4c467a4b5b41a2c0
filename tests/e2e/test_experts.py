"""A real run of a model with experts: two tensor parallel ranks, published, saved, exported, continued and audited."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import TINY, Place, journal, lines, marker, merged
from tests.workers.parity_jobs import MOE

RUN = {
    "loop": {"num_rollout": 3},
    "model": {**TINY["model"], "config": MOE.config},
    "train": {**TINY["train"], "tensor_model_parallel_size": 2},
    "checkpoint": {"save_interval": 1, "save_hf_interval": 3, "async_save": True},
}


@pytest.mark.prove
def test_experts_are_trained_published_saved_and_continued(place: Place) -> None:
    place.train("whole", RUN)
    place.train("cut", merged(RUN, {"loop": {"num_rollout": 2}}))
    place.train("cut", RUN)
    whole, cut = place.path / "whole", place.path / "cut"
    steps = lines(whole / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[0]["train/grad_norm"] > 0
    assert len({entry["digest"] for entry in journal(whole, "driver", "publish")}) == 4
    assert journal(cut, "driver", "gang_started")[-1]["resume"]["start_rollout_id"] == 2
    assert marker(cut / "checkpoints", 2)["digest"] == marker(whole / "checkpoints", 2)["digest"]
    exported = AutoModelForCausalLM.from_pretrained(whole / "huggingface" / "2")
    assert exported.config.num_experts == 4
    for run_dir in (whole, cut):
        assert place.run("audit", run_dir).code == 0
