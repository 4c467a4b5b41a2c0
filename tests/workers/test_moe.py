"""Layers of experts: gradients are those of transformers, a step and its checkpoint the same on every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from orchestrator.checks import megatron_fields
from tests.workers.gang_processes import Place, run_gang
from tests.workers.test_forward import SAMPLES, TARGETS, assert_same_step, case, run_cases
from tests.workers.tiny_models import tiny
from tests.workers.train_jobs import (
    MODEL,
    TEMPERATURE,
    Setting,
    Shards,
    farthest,
    gang,
    gradients,
    make_trainee,
    no_distributed_optimizer,
    totals_of,
    whole,
)
from workers.config import AlgorithmConfig, ModelConfig
from workers.megatron.forward import score, train_step
from workers.megatron.hf_io import load_huggingface
from workers.megatron.hf_layout import GptWeights
from workers.megatron.loss import TrainSample
from workers.megatron.model import build, load_hf_config, transformer_config
from workers.megatron.parallel import Layout
from workers.rollout.transformers_layout import named_tensors

HERE = "tests.workers.test_moe"
JOBS = "tests.workers.checkpoint_jobs"
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MOE = MODEL.model_copy(update={"config": {**(MODEL.config or {}), **EXPERTS}})
PLAIN = no_distributed_optimizer(Setting(model=MOE))
EVERY_TOKEN = [replace(sample, loss_mask=(1,) * len(sample.response_ids)) for sample in SAMPLES]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tp": 2}, id="tp2"),
        pytest.param({"pp": 2}, id="pp2", marks=pytest.mark.prove),
        pytest.param({}, id="dp2", marks=pytest.mark.prove),
    ],
)
def test_every_layout_takes_the_same_step(sizes: dict[str, int]) -> None:
    (expected,) = run_cases(1, PLAIN, [case([TARGETS], 96)])
    shares = [TARGETS] if sizes else [TARGETS[:5], TARGETS[5:]]
    (steps,) = run_cases(2, replace(PLAIN, **sizes), [case(shares, 30)])
    assert_same_step(steps, expected, gradients=True)


def test_sequence_parallelism_takes_the_same_step_in_dense_layers() -> None:
    (expected,) = run_cases(1, no_distributed_optimizer(Setting()), [case([TARGETS], 96)])
    split = no_distributed_optimizer(Setting(tp=2))
    split = replace(split, train=split.train.model_copy(update={"megatron": {"sequence_parallel": True}}))
    (steps,) = run_cases(2, split, [case([TARGETS], 30)])
    assert_same_step(steps, expected, gradients=True)


def gradients_of_log_probs(place: Place, directory: str) -> dict[str, Tensor]:
    """Of minus the mean log-prob of all response tokens, by name. On policy the policy loss is that."""
    setting = replace(PLAIN, train=PLAIN.train.model_copy(update={"clip_grad": 0.0}))
    setting = replace(setting, model=ModelConfig(hf_checkpoint=directory, dtype="float32"))
    with gang(place, setting) as layout:
        model, optimizer = make_trainee(layout, setting)
        load_huggingface(GptWeights(model), directory)
        optimizer.reload_masters()
        scores = score(model, EVERY_TOKEN, temperature=TEMPERATURE, max_tokens=30)
        assert scores is not None
        found: list[Shards] = []
        train_step(
            model,
            optimizer,
            [TrainSample(*item) for item in zip(EVERY_TOKEN, [1.0] * 8, scores.logprobs, strict=True)],
            totals_of(EVERY_TOKEN),
            algorithm=AlgorithmConfig(),
            temperature=TEMPERATURE,
            max_tokens=30,
            before_write=lambda: found.append(gradients(model)),
        )
        return whole(found)


def theirs(model: PreTrainedModel) -> dict[str, Tensor]:
    total = sum(len(sample.response_ids) for sample in EVERY_TOKEN)
    for sample in EVERY_TOKEN:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logprobs = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        (-logprobs.gather(1, torch.tensor(sample.response_ids)[:, None]).sum() / total).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


@pytest.mark.parametrize(
    "normalised",
    [pytest.param(True, id="normalised"), pytest.param(False, id="as they are", marks=pytest.mark.prove)],
)
def test_gradients_are_those_of_transformers_also_of_the_router(normalised: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = ModelConfig(config={**(MOE.config or {}), "norm_topk_prob": normalised}, dtype="float32")
    model = AutoModelForCausalLM.from_config(load_hf_config(config))
    model.save_pretrained(tmp_path)
    (ours,) = run_gang(f"{HERE}:gradients_of_log_probs", 1, (str(tmp_path),))
    expected = theirs(model)
    assert farthest(ours, expected) < 1e-6
    assert float(expected["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4


@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.prove)], ids=["tp2", "pp2"])
def test_a_checkpoint_continues_to_the_same_weights_on_another_layout(sizes: dict[str, int], tmp_path: Path) -> None:
    setting = Setting(model=MOE)
    (saved,) = run_gang(f"{JOBS}:train_and_save", 1, (setting, tmp_path, 2))
    resumed = run_gang(f"{JOBS}:load_and_train", 2, (replace(setting, **sizes), tmp_path, 2))
    assert farthest(whole([rank[1] for rank in resumed]), whole([saved[1]])) < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "some layers have no experts"),
        ({"decoder_sparse_step": 2}, "some layers have no experts"),
        ({"num_experts_per_tok": 1}, "leaves the router nothing to learn"),
        ({"use_sliding_window": True, "sliding_window": 4}, "only full attention"),
    ],
)
def test_what_these_layers_do_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    model = tiny("qwen3-moe", **changes)
    with pytest.raises(ValueError, match=message):
        build(load_hf_config(model), Layout(1), model, {}, seed=0)


@pytest.mark.parametrize(
    ("layout", "megatron", "message"),
    [
        (Layout(1), {"expert_model_parallel_size": 2}, "expert_model_parallel_size is decided"),
        (Layout(1), {"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff is decided"),
        (Layout(2, tp=2), {"sequence_parallel": False}, "needed for experts that TP ranks share"),
        (Layout(4, tp=4), {}, "moe_intermediate_size 10 is not a multiple of tensor parallel size 4"),
    ],
)
def test_options_that_cannot_be_right_are_refused(layout: Layout, megatron: dict[str, Any], message: str) -> None:
    model = tiny("qwen3-moe", moe_intermediate_size=10)
    with pytest.raises(ValueError, match=message):
        build(load_hf_config(model), layout, model, megatron, seed=0)


def test_what_the_model_decides_is_refused_before_anything_starts() -> None:
    hf_config, refused = load_hf_config(tiny("qwen3-moe")), []
    for key in megatron_fields.fields() or {}:
        try:
            transformer_config(hf_config, Layout(1), torch.float32, {key: None})
        except ValueError as error:
            if f"{key} is decided" in str(error):
                refused.append(key)
        except Exception:
            continue  # None is not a value of this field, but it may be set
    assert "moe_router_topk" in refused
    assert set(refused) <= set(megatron_fields.DECIDED)
