"""What a checkpoint must agree on with a run that continues from it: model, tokenizer, data.

Read from files alone, without loading any of the three, so that a wrong resume is refused before anything starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator import hf_files
from orchestrator.config import Config
from orchestrator.data.context import prompt_limit
from orchestrator.data.path import parse
from state.errors import ResumeError

_NOT_ARCHITECTURE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja")


def fingerprints(config: Config) -> dict[str, str]:
    """`NAME/HASH` of `model`, `tokenizer` and `data`: 16 hex digits, and a name for people.

    A tokenizer or data that this machine cannot read is left out. Raises `ResumeError` for a model without a config.
    """
    found = {"model": model_fingerprint(config), "tokenizer": _tokenizer(config), "data": _data(config)}
    return {kind: value for kind, value in found.items() if value is not None}


def differing(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What both know and do not agree on: kind -> (saved, current). Names do not count."""
    return {
        kind: (saved[kind], current[kind])
        for kind in current
        if kind in saved and saved[kind].rpartition("/")[2] != current[kind].rpartition("/")[2]
    }


def model_fingerprint(config: Config) -> str:
    """Of the architecture. Raises `ResumeError` for a model without a config."""
    architecture = {key: value for key, value in _hf_config(config).items() if key not in _NOT_ARCHITECTURE}
    return f"{architecture.get('model_type')}/{_hash([json.dumps(architecture, sort_keys=True, default=str).encode()])}"


def _tokenizer(config: Config) -> str | None:
    """Of the vocabulary and the chat template; other settings of a tokenizer are rewritten by every library version."""
    given = config.model.tokenizer or config.model.hf_checkpoint
    directory = Path(given) if given is not None else None
    if directory is None or not directory.is_dir():
        return None
    contents = [(directory / name).read_bytes() for name in _TOKENIZER_FILES if (directory / name).is_file()]
    settings = hf_files.read(directory / "tokenizer_config.json", "model.tokenizer")
    if settings is not None:
        contents.append(json.dumps(settings.get("chat_template")).encode())
    return f"{directory.absolute().name}/{_hash(contents)}" if contents else None


def _data(config: Config) -> str | None:
    """Of the rows and of everything that decides which of them come in which order."""
    data = config.data
    limit = prompt_limit(config.model, data, config.rollout)
    settings = json.dumps([config.run.seed, data.apply_chat_template, limit]).encode()
    seed = f"(run.seed={config.run.seed})"  # in the name, since it is what people change without a thought of the data
    if data.generator is not None:
        return f"{data.generator}{seed}/{_hash([settings, data.generator.encode()])}"
    if data.path is None:
        return None
    at = parse(data.path)
    if not at.path.exists():
        return None
    order = json.dumps([data.input_key, data.label_key, data.shuffle, at.suffix]).encode()
    return f"{at.path.absolute().name}{at.suffix}{seed}/{_hash(chain([settings, order], _chunks(at.path)))}"


def _chunks(path: Path) -> Iterator[bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                yield chunk


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _hf_config(config: Config) -> Mapping[str, Any]:
    fields = hf_files.model_fields(config.model)
    if fields is None:
        raise ResumeError(f"{config.model.hf_checkpoint} holds no config.json, which says what the model is")
    return fields
