"""What the process of test_real_weights.py does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.e2e.in_process_run import Outcome, go
from tests.workers.gang_processes import Place
from tests.workers.megatron_jobs import gang
from workers.batch import Prompt, Sample
from workers.config import ModelConfig
from workers.megatron.hf_io import load_huggingface
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout


def logits(place: Place, directory: Path, ids: Tensor) -> Tensor:
    """float32 [sequences, tokens, vocabulary], without the padding rows."""
    model = ModelConfig(hf_checkpoint=str(directory), dtype="float32", megatron_to_hf_mode="bridge")
    with gang(place, Layout(1)), torch.no_grad():
        gpt = build(load_hf_config(model), Layout(1), model, {}, seed=None).eval()
        weights = GptWeights(gpt)
        load_huggingface(weights, directory)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        found: Tensor = gpt(ids, positions, None)
        return found[..., : weights.hf_config.vocab_size].float()


def train(place: Place, run_dir: Path, changes: Mapping[str, Any]) -> Outcome:
    return go(run_dir, changes)


def variety(prompt: Prompt, response: str, ids: tuple[int, ...], sample: Sample) -> float:
    """A reward: different characters in the response, up to 20, as a share."""
    return min(20, len(set(response))) / 20
