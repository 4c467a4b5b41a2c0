"""Small Hugging Face configs of the families that Megatron builds here."""

from __future__ import annotations

from typing import Any

from workers.config import ModelConfig

_SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_NO_HEAD_DIM = {key: value for key, value in _SMALL.items() if key != "head_dim"} | {"hidden_size": 48}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}

TINY: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True, **_SMALL},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False, **_SMALL},
    "qwen3-moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **_SMALL, **_EXPERTS},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, **_NO_HEAD_DIM},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False, **_NO_HEAD_DIM},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_SMALL},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, **_SMALL},
}


def tiny(name: str, **changes: Any) -> ModelConfig:
    """The named model in float32, random, with `changes` to its Hugging Face config."""
    return ModelConfig(config={**TINY[name], **changes}, dtype="float32")
