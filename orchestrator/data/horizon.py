"""How long a run is: rollouts, or epochs of its data, which are counted before anything that depends on it."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.data.context import limited


def rollouts(num_epoch: int, prompts: int, batch: int) -> int:
    """The least number of batches in which each of `prompts` comes `num_epoch` times. The data goes on where an epoch
    ends, also in the middle of a batch, so that only the very last batch is filled up."""
    return -(-num_epoch * prompts // batch)


def settled(config: Config) -> Config:
    """`config` with its length in rollouts: as it is, or with `loop.num_epoch` replaced by what that comes to.

    Costs the import of transformers, and tokenises all of `data.path`, since prompts that are left out do not count.
    Raises `DataError` or `TokenizerError`.
    """
    loop = config.loop
    if loop.num_epoch is None:
        return config
    from orchestrator.data.source import DataSource
    from orchestrator.data.tokenizer import load_tokenizer

    data = limited(config.model, config.data, config.rollout)
    prompts = DataSource(data, load_tokenizer(config.model), config.run.seed).usable_per_epoch()
    counted = rollouts(loop.num_epoch, prompts, config.rollout.rollout_batch_size)
    return config.model_copy(update={"loop": loop.model_copy(update={"num_rollout": counted, "num_epoch": None})})
