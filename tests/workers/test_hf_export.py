"""A gang's weights as a Hugging Face directory: the same bytes from every layout, which transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from state.digest import digest_tensor
from tests.workers.gang_processes import run_gang
from tests.workers.megatron_jobs import LAYOUTS
from tests.workers.tiny_models import tiny
from workers.config import ModelConfig
from workers.megatron import random_init
from workers.megatron.hf_io import INDEX, SINGLE_FILE
from workers.megatron.hf_layout import expected_tensors
from workers.megatron.model import load_hf_config
from workers.rollout.transformers_layout import named_tensors

JOBS = "tests.workers.export_jobs"
MODELS: dict[str, ModelConfig] = {
    "qwen2-tied": tiny("qwen2-tied"),
    "llama-untied": tiny("llama-untied"),
    "qwen3-moe": tiny("qwen3-moe"),
    "qwen3-bf16": tiny("qwen3-tied").model_copy(update={"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("layout", "file_bytes"), [("one", 1 << 30), ("tp2", 6000), ("pp2", 1 << 30), ("tp2pp2", 6000)]
)
def test_transformers_loads_what_any_layout_exports(layout: str, file_bytes: int, tmp_path: Path) -> None:
    size = LAYOUTS[layout].world_size
    agreed, *_ = run_gang(f"{JOBS}:export", size, (LAYOUTS[layout], MODELS, tmp_path, file_bytes))
    for name, model in MODELS.items():
        hf_config, directory = load_hf_config(model), tmp_path / name
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        assert (files == [SINGLE_FILE]) == (layout == "one")
        assert (directory / INDEX).exists() == (layout != "one")
        written = {key: value for file in files for key, value in load_file(directory / file).items()}
        drawn = {
            tensor: random_init.draw(tensor, shape, 4, hf_config.initializer_range)
            for tensor, shape in expected_tensors(hf_config).items()
        }
        assert written.keys() == drawn.keys()
        assert all(torch.equal(written[tensor], value.to(written[tensor].dtype)) for tensor, value in drawn.items())
        assert {digest_tensor(*item) for item in written.items()} == set(agreed[name])
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert str(loaded.dtype) == f"torch.{model.dtype}"
        assert all(torch.equal(value, written[tensor]) for tensor, value in named_tensors(loaded).items())


def test_nothing_is_written_without_a_permit_to_save_or_that_nobody_swore_to(tmp_path: Path) -> None:
    ((permit, mismatch),) = run_gang(f"{JOBS}:refused", 1, (tiny("llama-untied"), tmp_path))
    assert "is for publish, not for save" in permit
    assert "lm_head.weight as put together is not actor as sworn to" in mismatch
    assert list(tmp_path.iterdir()) == []
