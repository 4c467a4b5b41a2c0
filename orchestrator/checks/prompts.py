"""Whether stored data has a prompt that can be used at all: read and tokenised here, before anything starts.

Costs the import of transformers, and one prompt unless the first are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.config import Config, DataConfig
from orchestrator.data.context import limited
from orchestrator.data.path import parse
from orchestrator.options.problems import Problem
from workers.config import SamplingConfig


def problems(config: Config) -> Iterator[Problem]:
    """Files that cannot be read as prompts, or every prompt of which is left out. What is not on this machine, data or
    tokenizer, is left to the machine that has it."""
    given = config.model.tokenizer or config.model.hf_checkpoint
    if given is None or not Path(given).is_dir():
        return
    uses: list[tuple[str, DataConfig, SamplingConfig]] = []
    if config.loop.num_rollout != 0 and config.debug.load_rollouts is None:
        uses.append(("data", config.data, config.rollout))
    if config.eval.interval is not None and config.eval.data is not None:
        uses.append(("eval.data", config.eval.data, config.eval.sampling))
    for key, data, sampling in uses:
        if data.path is not None and parse(data.path).path.exists():
            yield from _of(f"{key}.path", config, limited(config.model, data, sampling))


def _of(key: str, config: Config, data: DataConfig) -> Iterator[Problem]:
    from orchestrator.data.source import DataError, DataSource
    from orchestrator.data.tokenizer import TokenizerError, load_tokenizer

    try:
        DataSource(data, load_tokenizer(config.model), config.run.seed).first(1)
    except (DataError, TokenizerError) as error:
        yield Problem(key, str(error))
