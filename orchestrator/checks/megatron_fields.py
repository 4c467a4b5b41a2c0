"""Which keys `train.megatron` may hold, read from Megatron's sources without importing them (that takes seconds)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
)
_MODEL = "model.config or model.hf_checkpoint"
_DTYPE = "model.dtype"

DECIDED: Mapping[str, str | None] = MappingProxyType(
    {
        "lr": "train.lr",
        "min_lr": "train.min_lr",
        "weight_decay": "train.weight_decay",
        "adam_beta1": "train.adam_beta1",
        "adam_beta2": "train.adam_beta2",
        "adam_eps": "train.adam_eps",
        "clip_grad": "train.clip_grad",
        "use_distributed_optimizer": "train.use_distributed_optimizer",
        "tensor_model_parallel_size": "train.tensor_model_parallel_size",
        "pipeline_model_parallel_size": "train.pipeline_model_parallel_size",
        "context_parallel_size": "train.context_parallel_size",
        **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"), _DTYPE),
        **dict.fromkeys(
            (
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "kv_channels",
                "normalization",
                "layernorm_epsilon",
                "qk_layernorm",
                "gated_linear_unit",
                "activation_func",
                "add_bias_linear",
                "add_qkv_bias",
                "hidden_dropout",
                "attention_dropout",
                "num_moe_experts",
                "moe_ffn_hidden_size",
                "moe_router_topk",
                "moe_router_pre_softmax",
            ),
            _MODEL,
        ),
        **dict.fromkeys(
            (
                "optimizer",
                "perform_initialization",
                "use_cpu_initialization",
                "variable_seq_lengths",
                "moe_token_dispatcher_type",
                "moe_router_load_balancing_type",
                "moe_aux_loss_coeff",
                "moe_grouped_gemm",
                "expert_model_parallel_size",
                "persist_layer_norm",
                "finalize_model_grads_func",
                "grad_scale_func",
                "no_sync_func",
                "grad_sync_func",
                "param_sync_func",
                "timers",
            )
        ),
    }
)
"""Fields that Slotwise sets, and the option to use instead (None: there is none)."""

_ACCEPTS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
)


@cache
def fields() -> Mapping[str, str] | None:
    """Field name -> annotation of the three config classes; None when megatron-core is not installed."""
    spec = find_spec("megatron")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        core = Path(root) / "core"
        if core.is_dir():
            found: dict[str, str] = {}
            for file, name in _CLASSES:
                found |= _annotations(core / file, name)
            return MappingProxyType(found)
    return None


def accepts(annotation: str, value: object) -> bool:
    """Whether a value fits a simple annotation; annotations that are not simple are left to Megatron."""
    names = [name.strip() for name in annotation.removeprefix("Optional[").removesuffix("]").split("|")]
    if value is None:
        return "None" in names or annotation.startswith("Optional[") or not set(names) <= set(_ACCEPTS)
    names = [name for name in names if name != "None"]
    if not set(names) <= set(_ACCEPTS):
        return True
    kinds = tuple(kind for name in names for kind in _ACCEPTS[name])
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _annotations(file: Path, class_name: str) -> dict[str, str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {
                item.target.id: ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    raise LookupError(f"{file} defines no class {class_name}")
