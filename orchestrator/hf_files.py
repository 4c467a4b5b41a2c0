"""The small JSON files of a Hugging Face directory, read without loading what they describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.options.problems import ConfigError, Problem
from state.stored import Malformed, parse_object
from workers.config import ModelConfig


def model_fields(model: ModelConfig) -> Mapping[str, Any] | None:
    """The Hugging Face config of the model; None where its directory, which may be on another machine, has none here.

    Raises `ConfigError` for a file that is none.
    """
    if model.config is not None or model.hf_checkpoint is None:
        return model.config
    return read(Path(model.hf_checkpoint) / "config.json", "model.hf_checkpoint")


def read(file: Path, option: str) -> dict[str, Any] | None:
    """A file that `option` led to; None when it is not there. `ConfigError` when it is no JSON object."""
    try:
        return parse_object(file.read_bytes()) if file.is_file() else None
    except OSError as error:
        raise ConfigError([Problem(option, f"{file} cannot be read: {error.strerror}")]) from error
    except Malformed as error:
        raise ConfigError([Problem(option, f"{file} {error}; copy it anew from where the model came from")]) from error
