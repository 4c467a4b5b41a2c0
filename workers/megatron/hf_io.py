"""Weights from a Hugging Face directory (safetensors) into live parameters, and out again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from state.digest import Piece, dtype_name
from state.errors import CheckpointError, ResumeError
from workers.megatron.hf_layout import LM_HEAD, VALUE_HEAD, GptWeights, box, expected_tensors

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 1024**3
_FLOATS = ("F64", "F32", "F16", "BF16")
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "generation_config.json",
)


class HuggingFaceError(ResumeError):
    """A Hugging Face directory that is not whole, or not of this model."""


def load_huggingface(weights: GptWeights, directory: str | os.PathLike[str]) -> None:
    """Fill this rank's pieces from `directory`, reading no more than their slices; values are cast to their dtype. A
    critic's value head stays as it is.

    Raises HuggingFaceError that names the tensor when one is missing, left over, of another shape or not of floats.
    Every rank checks every tensor of the model before anything is written.
    """
    root = Path(directory)
    stored = _stored(root)
    _check(stored, expected_tensors(weights.hf_config), root)
    with contextlib.ExitStack() as stack:
        files: dict[Path, Any] = {}
        for piece in weights.pieces():
            if piece.name in VALUE_HEAD:
                continue
            path = stored[piece.name].path
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            piece.tensor.copy_(files[path].get_slice(piece.name)[box(piece.region)])


def save_huggingface(
    weights: GptWeights,
    directory: str | os.PathLike[str],
    *,
    files_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write config, safetensors and, from the directory `files_from`, tokenizer files to a new `directory`.

    For a gang of one rank, which holds the whole model. The directory appears whole or not at all. Raises
    CheckpointError when something is there already, or when this rank does not hold every tensor.
    """
    target = Path(directory)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; name a new directory")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        dtype = _write_weights(weights, partial, shard_bytes)
        describe(weights.hf_config, dtype, partial, files_from=files_from)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def describe(
    hf_config: PretrainedConfig,
    dtype: str,
    directory: str | os.PathLike[str],
    *,
    files_from: str | os.PathLike[str] | None,
) -> None:
    """Write config.json, for weights of `dtype`, and copies of the tokenizer files that stand in `files_from`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes a second

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = deepcopy(hf_config)
    config.dtype = dtype
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(target)
    if files_from is not None:
        for pattern in _COPIED:
            for source in Path(files_from).glob(pattern):
                shutil.copyfile(source, target / source.name)


def assemble(pieces: Iterable[Piece]) -> Tensor:
    """The whole tensor from pieces that cover it. CheckpointError when they do not."""
    parts = list(pieces)
    first = parts[0]
    whole = torch.empty(first.region.full_shape, dtype=first.tensor.dtype)
    for part in parts:
        whole[box(part.region)] = part.tensor.to(whole.device)
    held = sum({part.region: part.region.numel for part in parts}.values())
    if held != whole.numel():
        raise CheckpointError(
            f"{first.name}: {held} of its {whole.numel()} elements are on this rank; load the checkpoint on one rank"
        )
    return whole


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    shape: tuple[int, ...]
    dtype: str


def _stored(root: Path) -> dict[str, _Stored]:
    """Every tensor in the directory, from the headers of its files."""
    index, single = root / INDEX, root / SINGLE_FILE
    if index.is_file():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
            files = sorted({root / name for name in weight_map.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HuggingFaceError(f"{index} is not a whole index of safetensors files: {error}") from error
    elif single.is_file():
        files = [single]
    else:
        raise HuggingFaceError(f"{root} holds neither {SINGLE_FILE} nor {INDEX}; only safetensors are read")
    return {name: tensor for path in files for name, tensor in _header(path)}


def _header(path: Path) -> list[tuple[str, _Stored]]:
    if not path.is_file():
        raise HuggingFaceError(f"{path} is missing, though {INDEX} names it")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 (not a mapping)
            return [(name, _Stored(path, tuple(part.get_shape()), part.get_dtype())) for name, part in slices]
    except SafetensorError as error:
        raise HuggingFaceError(f"{path} is not a whole safetensors file: {error}") from error


def _check(stored: Mapping[str, _Stored], expected: Mapping[str, tuple[int, ...]], root: Path) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        raise HuggingFaceError(
            f"{root}: {missing[0]} is missing{_others(missing)}; the directory is of another model, or not whole"
        )
    # A tied model's files may repeat the embedding; old Llama files carry rope frequencies, which are computed.
    extra = sorted(
        name for name in stored if name not in expected and name != LM_HEAD and not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise HuggingFaceError(f"{root}: {extra[0]} is no tensor of this model{_others(extra)}")
    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise HuggingFaceError(f"{tensor.path}: {name} has shape {tensor.shape}, the model's is {shape}")
        if tensor.dtype not in _FLOATS:
            raise HuggingFaceError(f"{tensor.path}: {name} is stored as {tensor.dtype}; only floats are read")


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _write_weights(weights: GptWeights, directory: Path, shard_bytes: int) -> str:
    """Files in the order of the model; at most `shard_bytes` each, a bigger tensor alone. Returns the dtype's name."""
    by_name: dict[str, list[Piece]] = {name: [] for name in expected_tensors(weights.hf_config)}
    for piece in weights.pieces():
        by_name[piece.name].append(piece)
    absent = [name for name, pieces in by_name.items() if not pieces]
    if absent:
        raise CheckpointError(f"{absent[0]} is not on this rank{_others(absent)}; load the checkpoint on one rank")
    shards = list(_shards(by_name, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: assemble(by_name[name]) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    return dtype_name(next(iter(by_name.values()))[0].tensor.dtype)


def _shards(by_name: Mapping[str, list[Piece]], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    used = 0
    for name, pieces in by_name.items():
        size = sum(piece.tensor.nbytes for piece in pieces)
        if names and used + size > shard_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    yield names
