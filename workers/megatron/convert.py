"""Between Hugging Face directories and native checkpoints: on the CPU, in this process, on one rank.

What is made from a Hugging Face directory is a `release`: weights without iteration or optimizer, which every layout
can load. A native checkpoint directory holds, in `huggingface/`, the config and tokenizer that lead back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from state import checkpoints, saves
from state.digest import digest_pieces, dtype_name
from state.errors import ResumeError
from state.slots import Slot
from workers.config import ModelConfig
from workers.megatron import checkpoint, parallel
from workers.megatron.cpu import redirect
from workers.megatron.hf_io import describe, load_huggingface, save_huggingface
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import DTYPES, build, load_hf_config
from workers.megatron.parallel import Layout

HUGGINGFACE = "huggingface"
_ONE = Layout(1)
_TIMEOUT_S = 600.0


def convert(source: Path, out: Path) -> Path:
    """A Hugging Face directory becomes a checkpoint directory, a native checkpoint a Hugging Face directory.

    `source` may be a checkpoint directory (its tracker says which checkpoint) or one checkpoint in it. Returns where
    the result stands.
    """
    if checkpoints.inspect(source).is_huggingface:
        return to_native(source, out)
    return to_huggingface(_named(source), out)


def to_native(hf_dir: Path, root: Path) -> Path:
    """Write the weights of a Hugging Face directory, in the dtype of its config, as the `release` of `root`.

    Returns the release directory. Raises HuggingFaceError for a directory that is not whole, UnsupportedModel for a
    model that is not known here.
    """
    model = _model(hf_dir)
    with _one_rank(model) as gpt:
        weights = GptWeights(gpt)
        load_huggingface(weights, hf_dir)
        target = saves.begin_release(root)
        checkpoint.save_weights(target, gpt)
        describe(weights.hf_config, model.dtype, target / HUGGINGFACE, files_from=hf_dir)
        digest = digest_pieces(weights.pieces()).summary
        saves.commit_release(root, {"provenance": str(hf_dir), "dtype": model.dtype, "digest": digest})
    return target


def to_huggingface(native: Path, out: Path) -> Path:
    """Write one native checkpoint, an iteration or a release, as a new Hugging Face directory `out`."""
    described = native / HUGGINGFACE
    if (native / checkpoints.MARKER).is_file() and checkpoints.read_marker(native).role == Slot.CRITIC:
        raise ResumeError(
            f"{native} is of a critic, which is no language model; convert its actor's, or use it as it is"
        )
    if not (described / "config.json").is_file():
        raise ResumeError(
            f"{native} does not say which Hugging Face model it is: put the model's config.json, with its dtype, and "
            f"its tokenizer files into {described}"
        )
    with _one_rank(_model(described)) as gpt:
        checkpoint.load_weights(native, gpt)
        return save_huggingface(GptWeights(gpt), out, files_from=described)


def _named(source: Path) -> Path:
    """The checkpoint itself, or the one that the tracker of a checkpoint directory names."""
    if (source / checkpoints.MARKER).is_file():
        return source
    inventory = checkpoints.inspect(source)
    named = checkpoints.parse_tracker(inventory.tracker or "")
    if named == "release" and inventory.has_release:
        return checkpoints.release_dir(source)
    if isinstance(named, int) and named in inventory.complete:
        return checkpoints.iteration_dir(source, named)
    found = ", ".join(checkpoints.iteration_dir(source, n).name for n in inventory.complete) or "none"
    raise ResumeError(
        f"{source} is neither a Hugging Face directory (config.json and safetensors) nor a checkpoint, nor a directory "
        f"whose {checkpoints.TRACKER} names a complete one; complete iterations in it: {found}"
    )


def _model(hf_dir: Path) -> ModelConfig:
    """The model of a Hugging Face config, in the dtype that it names."""
    model = ModelConfig(hf_checkpoint=str(hf_dir))
    dtype = load_hf_config(model).dtype
    name = "float32" if dtype is None else dtype_name(dtype)
    if name not in DTYPES:
        raise ResumeError(
            f"{hf_dir}/config.json: dtype is {name}; only {' and '.join(DTYPES)} are kept as they are. "
            "Write one of these there to have the weights rounded to it"
        )
    return ModelConfig.model_validate({"hf_checkpoint": str(hf_dir), "dtype": name})


@contextmanager
def _one_rank(model: ModelConfig) -> Iterator[GPTModel]:
    """The whole model in this process, its weights zero."""
    with tempfile.TemporaryDirectory(prefix="slotwise-convert-") as directory, redirect():
        parallel.initialise(0, _ONE, f"file://{os.path.join(directory, 'rendezvous')}", 0, "cpu", _TIMEOUT_S)
        try:
            yield build(load_hf_config(model), _ONE, model, {}, seed=None)
        finally:
            parallel.shutdown()
