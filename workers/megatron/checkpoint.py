"""Native checkpoints: Megatron's `torch_dist` format, which any layout can load.

Every rank of the gang calls these together, inside `cpu.redirect`. A directory exists and is empty before a save; that
it became whole is for its caller to mark (`state/saves.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from torch.distributed.checkpoint import CheckpointException, Metadata, TensorStorageMetadata
from torch.nn import Module

from state import checkpoints
from state.errors import ResumeError
from state.gang import ActorPermit
from state.resume import LoadSpec
from workers.megatron import random_state
from workers.megatron.foreign_pickles import INDEX, check_objects, read_index
from workers.megatron.hf_layout import bare
from workers.megatron.optimizer import TrainOptimizer
from workers.megatron.torch_dist import WriteNow
from workers.megatron.value_head import is_value_head

# The one sharding of the distributed optimizer that every layout can load; rank 0 of a data-parallel group gathers it.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
_RUN = "slotwise"
_OPTIMIZER = "optimizer"
_RNG = "rng"


def directory(load: LoadSpec) -> Path:
    """Where the files of a native or release checkpoint stand."""
    match load.kind, load.path, load.iteration:
        case "native", str(path), int(iteration):
            return checkpoints.iteration_dir(Path(path), iteration) / (load.part or "")
        case "release", str(path), _:
            return checkpoints.release_dir(Path(path))
    raise ResumeError(f"{load} does not name a native checkpoint: it needs a path, and an iteration unless a release")


def save_state(
    path: Path, model: Module, optimizer: TrainOptimizer, *, permit: ActorPermit, by: WriteNow | None = None
) -> None:
    """Write weights, masters, moments, position in the learning-rate schedule, and the random state of every rank.

    `by`: who writes; unset, it is written when this returns.
    """
    permit.require("save")
    weights = bare(model).sharded_state_dict()
    state = {
        "model": weights,
        _OPTIMIZER: _optimizer_state(optimizer, weights, is_loading=False),
        _RNG: _random_object(random_state.capture()),
        _RUN: {"num_steps": optimizer.num_steps, "layout": _layout(), "masters": optimizer.masters},
    }
    _save(state, path, by)


def save_slot(path: Path, model: Module, *, permit: ActorPermit, by: WriteNow | None = None) -> None:
    """Write the weights that the live tensors stand for, of another slot than the actor, into `path`; makes it."""
    permit.require("save")
    path.mkdir(parents=True, exist_ok=True)
    _save({"model": bare(model).sharded_state_dict()}, path, by)


def save_weights(path: Path, model: Module) -> None:
    """Write weights alone: of a conversion, not of a run's slot."""
    _save({"model": bare(model).sharded_state_dict()}, path)


def load_weights(path: Path, model: Module, *, but_head: bool = False) -> None:
    """Fill the live weights, cast to their dtype, from a checkpoint with or without optimizer.

    `but_head`: from a policy's checkpoint into a critic, whose value head stays as it is.

    Raises:
        ResumeError: the checkpoint is not whole or not of this model; names the path and what is missing.
    """
    metadata = _whole(path)
    gpt = bare(model)
    weights = gpt.sharded_state_dict()
    if but_head:
        weights = {name: part for name, part in weights.items() if not is_value_head(part)}
    state = {"model": weights}
    _require(path, metadata, state)
    gpt.load_state_dict(_load(state, path)["model"], strict=not but_head)


def load_state(path: Path, model: Module, optimizer: TrainOptimizer, *, load_rng: bool = True) -> bool:
    """Continue from `save_state`, on any layout; hyper-parameters stay those of this run.

    Random state is restored where the layout is the one that was saved; elsewhere, or without `load_rng`, it stays as
    it was seeded. Returns whether it was restored.

    Raises:
        ResumeError: the checkpoint is not whole, not of this model, or has no optimizer state of this kind; names the
            path and what is missing.
    """
    metadata = _whole(path)
    run = _common(path).get(_RUN)
    if run is None:
        raise ResumeError(
            f"{path} holds no optimizer state (it was written as weights alone); set checkpoint.weights_only to start "
            "from its weights with a fresh optimizer"
        )
    if run["masters"] != optimizer.masters:
        raise ResumeError(
            f"{path} holds the optimizer state of {run['masters']}, which does not load into {optimizer.masters}: keep "
            "train.use_distributed_optimizer and model.dtype as they were, or set checkpoint.weights_only"
        )
    gpt, same_layout = bare(model), run["layout"] == _layout()
    weights = gpt.sharded_state_dict()
    state: dict[str, Any] = {"model": weights}
    _require(path, metadata, state)
    state[_OPTIMIZER] = _optimizer_state(optimizer, weights, is_loading=True)
    if load_rng and same_layout:
        state[_RNG] = _random_object(None)
    _require(path, metadata, state)
    loaded = _load(state, path)
    gpt.load_state_dict(loaded["model"])
    optimizer.megatron.load_state_dict(loaded[_OPTIMIZER])
    optimizer.restore_schedule(run["num_steps"])
    if _RNG not in state:
        return False
    random_state.restore(loaded[_RNG])
    return True


def _optimizer_state(optimizer: TrainOptimizer, weights: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    state = optimizer.megatron.sharded_state_dict({"model": weights}, is_loading=is_loading, metadata=METADATA)
    # Ranks that have handed their shards to another say so with a None, which the others do not have.
    return {key: value for key, value in state.items() if value is not None}


def _save(state: dict[str, Any], path: Path, by: WriteNow | None = None) -> None:
    dist_checkpointing.save(state, str(path), sharded_strategy=by or WriteNow(), content_metadata=dict(METADATA))


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = _or_resume_error(path, lambda: dist_checkpointing.load(state, str(path)))
    return loaded


def _common(path: Path) -> dict[str, Any]:
    """What is not sharded."""
    common: dict[str, Any] = _or_resume_error(path, lambda: dist_checkpointing.load_common_state_dict(str(path)))
    return common


def _or_resume_error(path: Path, read: Callable[[], Any]) -> Any:
    """Files may be damaged in ways that only their reader finds, each with an exception of its own."""
    try:
        return read()
    except (Exception, CheckpointException) as error:  # torch's is none of Python's ordinary ones
        raise ResumeError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _whole(path: Path) -> Metadata:
    """The index of a checkpoint all of whose files are there, as long as the index says."""
    for name in ("metadata.json", INDEX):
        _must_be_there(path, name)
    metadata = read_index(path)
    # From megatron-core 0.17 on, what is not sharded is an object among the others.
    common = [key for key in metadata.state_dict_metadata if key.startswith("common_state")]
    if not common:
        _must_be_there(path, "common.pt")
    needed: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        end = part.offset + part.length
        needed[part.relative_path] = max(end, needed.get(part.relative_path, 0))
    for name, size in sorted(needed.items()):
        file = _must_be_there(path, name)
        if file.stat().st_size < size:
            raise ResumeError(
                f"{path} is not a whole checkpoint: {name} has {file.stat().st_size} bytes, its index says {size}"
            )
    check_objects(path, metadata, common)
    return metadata


def _must_be_there(path: Path, name: str) -> Path:
    if not (path / name).is_file():
        raise ResumeError(f"{path} is not a whole checkpoint: {name} is missing")
    return path / name


def _require(path: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Everything that `state` asks for is in the checkpoint, in the right global shape, and safe to read."""
    missing, misfit, asked = set(), set(), set()
    for part in _sharded(state):
        key = part.unique_key if isinstance(part, ShardedObject) else part.key
        asked.add(key)
        stored = metadata.state_dict_metadata.get(key)
        if stored is None:
            missing.add(key)
        elif isinstance(stored, TensorStorageMetadata) and not part.allow_shape_mismatch:
            shapes = tuple(stored.size), tuple(part.global_shape)
            if shapes[0] != shapes[1]:
                misfit.add(f"{key} is {shapes[0]} there and {shapes[1]} here")
    if missing:
        raise ResumeError(f"{path} lacks {_some(missing)}")
    if misfit:
        raise ResumeError(f"{path} holds another model: {_some(misfit)}")
    check_objects(path, metadata, asked)


def _sharded(state: dict[str, Any]) -> Iterable[Any]:
    for part in nested_values(state):
        if isinstance(part, dist_checkpointing.mapping.ShardedTensorFactory):
            yield from nested_values(part.build())
        elif isinstance(part, ShardedBase) and not isinstance(part, dist_checkpointing.LocalNonpersistentObject):
            yield part


def _some(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _layout() -> list[int]:
    return [
        torch.distributed.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    ]


def _random_object(value: random_state.RandomState | None) -> ShardedObject:
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject(_RNG, value, (world_size,), (rank,))
