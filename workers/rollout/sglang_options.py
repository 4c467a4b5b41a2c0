"""What `rollout.sglang` says, told apart: keys of ours, and options of the server. Pure, and without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

OURS = ("python", "env")
"""`python`: the interpreter that SGLang is installed for. `env`: variables of the server's process."""

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
)
"""`model_type` of a Hugging Face config -> the server's class, of those whose weights can be proven."""

DECIDED: Mapping[str, str | None] = MappingProxyType(
    {
        "model_path": "model.hf_checkpoint or model.config",
        "tokenizer_path": "model.tokenizer",
        "skip_tokenizer_init": "model.tokenizer",
        "dtype": "model.dtype",
        "device": "rollout.gpus_per_engine",
        "max_running_requests": "rollout.max_batch_size",
        "dp_size": "rollout.num_engines",
        **dict.fromkeys(
            (
                "host",
                "port",
                "nccl_port",
                "load_format",
                "weight_version",
                "skip_server_warmup",
                "sampling_backend",
                "pp_size",
                "nnodes",
                "node_rank",
                "dist_init_addr",
                "quantization",
                "api_key",
                "admin_api_key",
            )
        ),
    }
)
"""Options of the server that Slotwise sets, and the option to use instead (None: there is none)."""


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """`server`: option of the server, by its field name (`mem_fraction_static`) -> value."""

    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    tp_size: int = 1
    server: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(section: Mapping[str, Any]) -> SglangOptions:
        rest = {key: value for key, value in section.items() if key not in (*OURS, "tp_size")}
        env = {name: str(value) for name, value in (section.get("env") or {}).items()}
        return SglangOptions(section.get("python") or sys.executable, env, int(section.get("tp_size", 1)), rest)


def flags(options: Mapping[str, Any]) -> list[str]:
    """As the server's command line takes them; None and False are what it does without the flag."""
    words: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        match value:
            case None | False:
                continue
            case True:
                words.append(flag)
            case list() | tuple():
                words += [flag, *map(str, value)]
            case dict():
                words += [flag, json.dumps(value)]
            case _:
                words += [flag, str(value)]
    return words
