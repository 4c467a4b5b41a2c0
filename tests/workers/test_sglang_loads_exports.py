"""SGLang loads what a gang exports: it holds the bytes that were sworn to, and computes what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from state.slots import WeightId
from tests.workers.engine_stage import QWEN3, TIMEOUT_S, TOKENIZER, sglang_python
from tests.workers.gang_processes import run_gang
from tests.workers.megatron_jobs import LAYOUTS
from tests.workers.test_engine_contract import furthest, requests
from workers.config import ModelConfig, SamplingConfig
from workers.rollout import sglang_plugin
from workers.rollout.protocol import mismatches
from workers.rollout.sglang import read_result, sampling_params
from workers.rollout.sglang_options import SglangOptions
from workers.rollout.sglang_proof import compose
from workers.rollout.sglang_server import ServerSpec, SglangServer

pytestmark = pytest.mark.sglang
WIDE = {**QWEN3, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS = {
    "qwen3 tied": WIDE,
    "qwen3 experts": {**WIDE, **EXPERTS, "model_type": "qwen3_moe", "tie_word_embeddings": False},
}
PROMPT = (3, 4, 5, 9, 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_server_holds_and_computes_what_was_exported(name: str, tmp_path: Path) -> None:
    """Exported by two tensor parallel ranks, in several files."""
    model = ModelConfig(config=MODELS[name], dtype="float32", tokenizer=TOKENIZER)
    sworn, _ = run_gang("tests.workers.export_jobs:export", 2, (LAYOUTS["tp2"], {"export": model}, tmp_path, 6000))
    directory = tmp_path / "export"
    assert len(list(directory.glob("*.safetensors"))) > 1
    server = SglangServer(
        ServerSpec(
            name="export",
            model=str(directory),
            tokenizer=None,
            dtype="float32",
            device="cpu",
            max_batch_size=8,
            options=SglangOptions(python=sglang_python(), server={"load_format": "auto"}),
            log=tmp_path / "server.log",
            start_timeout_s=120.0,
        )
    )
    try:
        held = server.client.post("/weights_checker", {"action": sglang_plugin.ACTION}, limit_s=TIMEOUT_S)
        assert mismatches(sworn["export"], compose(held["ranks"], 1)) == ()
        (request,) = requests(PROMPT)
        asked = {
            "input_ids": [list(request.prompt_ids)],
            "sampling_params": [sampling_params(SamplingConfig(max_response_len=8), request)],
            "return_logprob": True,
        }
        (answer,) = server.client.post("/generate", asked, limit_s=TIMEOUT_S)
    finally:
        server.stop()
    loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
    result = read_result(request, answer, WeightId(1, 0))
    assert len(result.response_ids) > 1
    assert furthest(loaded, PROMPT, result) < 1e-4
