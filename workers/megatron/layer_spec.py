"""Which modules a model is made of: Megatron's own, none of which needs Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


class RmsNorm(torch.nn.RMSNorm):
    """torch's norm. With sequence parallelism each TP rank norms its own part of the tokens, so Megatron is told to
    add up the gradients of its replicas."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, and the norm after the last. The local norms of Megatron refuse
    sequence parallelism; ours take their place."""
    # Without Transformer Engine nobody defines this name, which the router reads.
    vars(moe_utils).setdefault("te_general_gemm", None)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RmsNorm)
