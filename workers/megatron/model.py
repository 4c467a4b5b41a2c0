"""Builds this rank's stage of a GPT model from a Hugging Face config: Qwen3, Qwen3-MoE, Qwen2 (and 2.5) and Llama.

The local layer spec (no Transformer Engine) with `attention_mask=None` is causal, so sequences padded on the right
need no mask. Called inside `cpu.redirect(device)`, after `parallel.initialise`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, PretrainedConfig

from state.errors import SlotwiseError
from workers.config import ModelConfig
from workers.megatron import random_init
from workers.megatron.hf_layout import GptWeights, head_dim, is_moe
from workers.megatron.layer_spec import block_spec
from workers.megatron.parallel import Layout
from workers.megatron.value_head import ValueHead

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCAB_MULTIPLE = 16
"""The vocabulary is padded to a multiple of this and of TP, so that the usual layouts agree on the padded size."""


class UnsupportedModel(SlotwiseError, ValueError):
    """A Hugging Face config that asks for something these models do not do here; says what."""


@dataclass
class GptConfig(TransformerConfig):
    """Megatron's config of a Hugging Face model, with the config it came from."""

    hf: PretrainedConfig = dataclasses.field(kw_only=True)
    value_head: bool = dataclasses.field(kw_only=True, default=False)
    """Whether its last layer makes a value of each token, as a critic's does, and not logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_moe_experts is not None:
            # Megatron keeps this dispatcher from sequences of many lengths, since ranks that share experts must bring
            # equally many tokens. Here those are TP ranks alone, which do.
            self.moe_token_dispatcher_type = "allgather"

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding that are tokens; `GPTModel.vocab_size` counts the padding rows too."""
        return self.hf.vocab_size


def load_hf_config(model: ModelConfig) -> PretrainedConfig:
    """The Hugging Face config of `model.hf_checkpoint`, or the one written out in `model.config`."""
    if model.hf_checkpoint is not None:
        if not (Path(model.hf_checkpoint) / "config.json").is_file():
            raise FileNotFoundError(
                f"model.hf_checkpoint: {model.hf_checkpoint} holds no config.json; give a Hugging Face directory"
            )
        return _accepted(model.hf_checkpoint, lambda: AutoConfig.from_pretrained(model.hf_checkpoint))
    if model.config is None:
        raise ValueError("model: set hf_checkpoint (a Hugging Face directory) or config (a Hugging Face config)")
    fields = dict(model.config)
    model_type = fields.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model.config: model_type is {model_type!r}; known here: {', '.join(MODEL_TYPES)}")
    return _accepted("model.config", lambda: AutoConfig.for_model(model_type, **fields))


def _accepted(where: str, load: Callable[[], PretrainedConfig]) -> PretrainedConfig:
    """Whatever transformers raises about a config says what is wrong with it, in a type of its own."""
    try:
        return load()
    except Exception as error:
        raise UnsupportedModel(f"{where} is no config that transformers takes: {error!r}") from error


def build(
    hf_config: PretrainedConfig,
    layout: Layout,
    model: ModelConfig,
    megatron: Mapping[str, Any],
    *,
    seed: int | None,
    value_head: bool = False,
) -> GPTModel:
    """This rank's stage of the model on the current device, in `model.dtype`, in train mode.

    With a `value_head` it is a critic: it returns float32 values [b, s, 1], and ties its embedding to nothing.
    Its weights are random from `seed`, the same model on every layout; with `seed=None` they are zeros for a loader to
    fill. Of `megatron` the keys that are fields of TransformerConfig apply; what the Hugging Face config or the layout
    decides cannot be overridden. Raises UnsupportedModel, or ValueError for a layout that does not divide the model.
    """
    _check_supported(hf_config)
    _check_divisible(hf_config, layout)
    config = transformer_config(hf_config, layout, DTYPES[model.dtype], megatron)
    config.value_head = value_head
    rope = _rope(hf_config)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=padded_vocab_size(hf_config.vocab_size, layout.tp),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=rope.theta,
        rope_scaling=rope.llama3_factor is not None,
        rope_scaling_factor=rope.llama3_factor or 1.0,
        seq_len_interpolation_factor=rope.linear_factor,
    )
    if value_head and gpt.post_process:
        gpt.output_layer = ValueHead(config)
    # The norms are torch's and come as float32 on the CPU.
    gpt.cuda(torch.cuda.current_device())
    gpt.to(config.params_dtype)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    if seed is not None:
        random_init.fill(GptWeights(gpt), seed, hf_config.initializer_range)
    return gpt


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all TP ranks."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return math.ceil(vocab_size / multiple) * multiple


def transformer_config(
    hf_config: PretrainedConfig, layout: Layout, dtype: torch.dtype, megatron: Mapping[str, Any]
) -> GptConfig:
    """Megatron's config of the model; `megatron` may change what the model and the layout leave open."""
    decided: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "qk_layernorm": hf_config.model_type in ("qwen3", "qwen3_moe"),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Our own random weights, the same on every layout.
        "perform_initialization": False,
        "use_cpu_initialization": False,
        # Micro-batches differ in length. Megatron allows that with this dispatcher alone, also in dense models.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # torch's norm has no persistent kernel.
        "persist_layer_norm": False,
        "expert_model_parallel_size": 1,
        **(_experts(hf_config) if is_moe(hf_config) else {}),
    }
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    chosen = {key: value for key, value in megatron.items() if key in fields}
    if is_moe(hf_config) and layout.tp > 1 and not chosen.setdefault("sequence_parallel", True):
        raise ValueError("train.megatron.sequence_parallel is needed for experts that TP ranks share; leave it out")
    clashes = sorted(chosen.keys() & decided.keys())
    if clashes:
        raise ValueError(f"train.megatron.{clashes[0]} is decided by the model and the layout; remove it")
    # Every *_fusion is off by default, which the local spec needs where there is no Apex.
    return GptConfig(**decided, **chosen, hf=hf_config)


def _experts(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Each token goes to the experts of its largest router probabilities, none is dropped, and nothing but the loss
    trains the router."""
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # A softmax over the chosen logits alone is the normalised softmax over all.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


@dataclass(frozen=True, slots=True)
class _Rope:
    theta: float
    linear_factor: float | None
    llama3_factor: float | None


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rope(hf_config: PretrainedConfig) -> _Rope:
    parameters: Mapping[str, Any] = hf_config.rope_parameters
    kind = parameters["rope_type"]
    theta = float(parameters["rope_theta"])
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("rope_parameters.partial_rotary_factor other than 1")
    if kind == "default":
        return _Rope(theta, None, None)
    if kind == "linear":
        return _Rope(theta, float(parameters["factor"]), None)
    if kind == "llama3":
        for key, known in _LLAMA3.items():
            if parameters[key] != known:
                raise UnsupportedModel(
                    f"rope_parameters.{key} is {parameters[key]}; Megatron's llama3 rope has {known}"
                )
        return _Rope(theta, None, float(parameters["factor"]))
    raise UnsupportedModel(f"rope_parameters.rope_type {kind!r}; known here: default, linear, llama3")


def _check_supported(hf_config: PretrainedConfig) -> None:
    if hf_config.model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model_type {hf_config.model_type!r}; known here: {', '.join(MODEL_TYPES)}")
    wrong = [
        f"{name} is {value!r}, only {known!r} is known here"
        for name, value, known in (
            ("hidden_act", hf_config.hidden_act, "silu"),
            ("attention_dropout", hf_config.attention_dropout, 0.0),
        )
        if value != known
    ]
    # Qwen2 has no such option: biases of queries, keys and values are part of it.
    if hf_config.model_type != "qwen2" and hf_config.attention_bias:
        wrong.append("attention_bias is True, only False is known here")
    if hf_config.model_type == "llama" and hf_config.mlp_bias:
        wrong.append("mlp_bias is True, only False is known here")
    if hf_config.model_type in ("qwen3", "qwen2") and set(hf_config.layer_types) - {"full_attention"}:
        wrong.append("layer_types has layers of sliding attention, only full attention is known here")
    if is_moe(hf_config):
        if hf_config.use_sliding_window:
            wrong.append("use_sliding_window is True, only full attention is known here")
        if hf_config.mlp_only_layers or hf_config.decoder_sparse_step != 1:
            wrong.append(
                "some layers have no experts (mlp_only_layers, decoder_sparse_step); all or none are known here"
            )
        if hf_config.num_experts_per_tok == 1 and hf_config.norm_topk_prob:
            wrong.append("norm_topk_prob with one expert per token leaves the router nothing to learn")
    if wrong:
        raise UnsupportedModel(f"{hf_config.model_type} config: {'; '.join(wrong)}")


def _check_divisible(hf_config: PretrainedConfig, layout: Layout) -> None:
    layout.check()
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if is_moe(hf_config):
        ffn = ("moe_intermediate_size", hf_config.moe_intermediate_size)
    else:
        ffn = ("intermediate_size", hf_config.intermediate_size)
    for name, size, by, divisor in (
        ("num_hidden_layers", hf_config.num_hidden_layers, "pipeline parallel size", layout.pp),
        ("num_key_value_heads", groups, "tensor parallel size", layout.tp),
        (*ffn, "tensor parallel size", layout.tp),
        ("num_attention_heads", heads, "num_key_value_heads", groups),
    ):
        if size % divisor:
            raise ValueError(f"{name} {size} is not a multiple of {by} {divisor}")
