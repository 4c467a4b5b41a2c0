"""The arithmetic of a rollout: samples, optimizer steps, data-parallel ranks."""

from __future__ import annotations

from orchestrator.config import Config


def data_parallel_size(config: Config) -> int:
    """Replicas of the model in the training gang."""
    train = config.train
    model_parallel = train.tensor_model_parallel_size * train.pipeline_model_parallel_size * train.context_parallel_size
    return train.num_workers // model_parallel


def samples_per_rollout(config: Config) -> int:
    return config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt


def steps_per_rollout(config: Config) -> int:
    """Optimizer steps that one rollout is trained in."""
    if config.train.global_batch_size is not None:
        return samples_per_rollout(config) // config.train.global_batch_size
    return config.train.num_steps_per_rollout or 1


def num_rollouts(config: Config) -> int:
    """Rollouts of the whole run. Raises `ValueError` for epochs that nobody has counted (`horizon.settled`)."""
    if config.loop.num_rollout is None:
        raise ValueError(f"loop.num_rollout is not known yet: loop.num_epoch is {config.loop.num_epoch}")
    return config.loop.num_rollout


def total_steps(config: Config) -> int:
    """Optimizer steps of the whole run."""
    return num_rollouts(config) * steps_per_rollout(config)
