"""Whether a Hugging Face config can be that of a model, and be split as the configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.checks.divisors import divisors, listed
from orchestrator.config import Config
from orchestrator.hf_files import model_fields, read
from orchestrator.options.problems import Problem
from state.stored import shown

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_HEAD_DIM_OF_ITS_OWN = ("qwen3", "qwen3_moe")
"""Types whose `head_dim` does not follow from the others where it is left out."""
Fields = Mapping[str, Any]


def check(config: Config) -> Iterator[Problem]:
    """Of a model that is written out in the configuration."""
    if config.model.config is not None:
        yield from _problems(config, config.model.config, "model.config.{}")


def of_files(config: Config) -> Iterator[Problem]:
    """Of a model whose Hugging Face directory is on this machine."""
    if config.model.config is None and (fields := model_fields(config.model)) is not None:
        option = "model.hf_checkpoint"
        for problem in _problems(config, fields, "{}"):
            of_option = problem.key.startswith("train.")
            yield problem if of_option else Problem(option, f"config.json: {problem.key}: {problem.message}")


def vocabulary(config: Config) -> Iterator[Problem]:
    """A model that is written out must know every token of the tokenizer, where that is on this machine."""
    size = (config.model.config or {}).get("vocab_size")
    if config.model.tokenizer is None or type(size) is not int:
        return
    needed = _tokens_of(read(Path(config.model.tokenizer) / "tokenizer.json", "model.tokenizer") or {})
    if 0 < size < needed:
        yield Problem(
            "model.config.vocab_size",
            f"{size} is less than the {needed} tokens of {config.model.tokenizer}; use at least {needed}",
        )


def _tokens_of(tokenizer: Fields) -> int:
    """One more than the largest id in a `tokenizer.json`; 0 where it does not say in a known way."""
    ids = [-1]
    match tokenizer.get("model"):
        case {"vocab": dict(vocab)}:
            ids += [number for number in vocab.values() if type(number) is int]
        case {"vocab": list(vocab)}:
            ids.append(len(vocab) - 1)
    match tokenizer.get("added_tokens"):
        case list(added):
            ids += [number for one in added for number in _id_of(one)]
    return max(ids) + 1


def _id_of(token: Any) -> list[int]:
    match token:
        case {"id": int(number)}:
            return [number]
    return []


def _problems(config: Config, fields: Fields, key: str) -> Iterator[Problem]:
    """Of `fields`, a Hugging Face config. `key`: how a user would name a field of it."""
    wrong = list(_sizes(fields, key))
    yield from wrong
    if not wrong:
        yield from _heads(fields, key)
        yield from _tokens(fields, key)
        yield from _split(config, fields)


def _sizes(fields: Fields, key: str) -> Iterator[Problem]:
    sizes = _SIZES + (_EXPERTS if fields.get("model_type") == "qwen3_moe" else ())
    for name in sizes:
        value = fields.get(name)
        if value is not None and (type(value) is not int or value < 1):
            yield Problem(key.format(name), f"given {shown(value)}; accepted: a whole number of at least 1")


def _heads(fields: Fields, key: str) -> Iterator[Problem]:
    heads, hidden, groups = (fields.get(n) for n in ("num_attention_heads", "hidden_size", "num_key_value_heads"))
    follows = fields.get("head_dim") is None and fields.get("model_type") not in _HEAD_DIM_OF_ITS_OWN
    if heads and hidden and follows and hidden % heads:
        yield Problem(
            key.format("num_attention_heads"),
            f"{heads} heads do not divide hidden_size {hidden}; valid: {listed(divisors(hidden))} (or give head_dim)",
        )
    dim = fields.get("head_dim") or (hidden // heads if heads and hidden and follows else None)
    if dim is not None and dim % 2:
        yield Problem(key.format("head_dim"), f"heads of {dim} cannot be rotated in pairs (RoPE); use an even number")
    if heads and groups and heads % groups:
        yield Problem(
            key.format("num_key_value_heads"),
            f"{groups} do not divide num_attention_heads {heads}; valid: {listed(divisors(heads))}",
        )
    experts, chosen = fields.get("num_experts"), fields.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        yield Problem(key.format("num_experts_per_tok"), f"{chosen} of {experts} experts; use at most {experts}")


def _tokens(fields: Fields, key: str) -> Iterator[Problem]:
    """Special tokens must be of the vocabulary."""
    vocabulary = fields.get("vocab_size")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        given = fields.get(name)
        for token in given if isinstance(given, list) else [given]:
            if token is None or vocabulary is None:
                continue
            if type(token) is not int or not -1 <= token < vocabulary:
                last = vocabulary - 1
                yield Problem(
                    key.format(name), f"{shown(token)} is no token of vocab_size {vocabulary}; use 0 to {last}"
                )


def _split(config: Config, fields: Fields) -> Iterator[Problem]:
    """Over the ranks of a replica."""
    train = config.train
    inner = "moe_intermediate_size" if fields.get("model_type") == "qwen3_moe" else "intermediate_size"
    tensor, pipeline = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    for key, parts, option in (
        ("num_attention_heads", tensor, "tensor_model_parallel_size"),
        ("num_key_value_heads", tensor, "tensor_model_parallel_size"),
        (inner, tensor, "tensor_model_parallel_size"),
        ("num_hidden_layers", pipeline, "pipeline_model_parallel_size"),
    ):
        size = fields.get(key)
        if size and size % parts:
            where = "model.config" if config.model.config is not None else "the model's config.json"
            valid = listed(divisors(size))
            yield Problem(f"train.{option}", f"{parts} does not divide {key} {size} of {where}; valid: {valid}")
