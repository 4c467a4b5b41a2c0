"""How long a prompt may be: what the model's context leaves beside a response."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config import Config, DataConfig
from orchestrator.hf_files import model_fields
from orchestrator.options.problems import Problem
from workers.config import ModelConfig, SamplingConfig

USUAL_PROMPT = 1024


def context_len(model: ModelConfig) -> int | None:
    """Positions that the model was made for; None when its config, which may be on another machine, does not say."""
    return _number(model, "max_position_embeddings")


def vocab_size(model: ModelConfig) -> int | None:
    """Tokens that the model knows; None when its config, which may be on another machine, does not say."""
    return _number(model, "vocab_size")


def _number(model: ModelConfig, key: str) -> int | None:
    value = (model_fields(model) or {}).get(key)
    return value if isinstance(value, int) else None


def prompt_limit(model: ModelConfig, data: DataConfig, sampling: SamplingConfig) -> int:
    """Tokens of the longest prompt of `data` that is not left out."""
    if data.max_prompt_len is not None:
        return data.max_prompt_len
    context = context_len(model)
    return USUAL_PROMPT if context is None else max(1, min(USUAL_PROMPT, context - sampling.max_response_len))


def limited(model: ModelConfig, data: DataConfig, sampling: SamplingConfig) -> DataConfig:
    """`data` with its limit written out."""
    return data.model_copy(update={"max_prompt_len": prompt_limit(model, data, sampling)})


def problems(config: Config) -> Iterator[Problem]:
    """Prompts and responses that do not fit into the context together."""
    context = context_len(config.model)
    if context is None:
        return
    uses: list[tuple[str, str, DataConfig, SamplingConfig]] = [("data", "rollout", config.data, config.rollout)]
    if config.eval.interval is not None and config.eval.data is not None:
        uses.append(("eval.data", "eval.sampling", config.eval.data, config.eval.sampling))
    for data_key, sampling_key, data, sampling in uses:
        room = context - sampling.max_response_len
        if room < 1:
            yield Problem(
                f"{sampling_key}.max_response_len",
                f"{sampling.max_response_len} leaves no prompt in the model's context (max_position_embeddings "
                f"{context}); use at most {context - 1}",
            )
        elif data.max_prompt_len is not None and data.max_prompt_len > room:
            yield Problem(
                f"{data_key}.max_prompt_len",
                f"{data.max_prompt_len} + {sampling_key}.max_response_len {sampling.max_response_len} exceed the "
                f"model's context (max_position_embeddings {context}); use at most {room}, or leave it out",
            )
