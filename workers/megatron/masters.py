"""Whether the optimizer's master weights are what the model computes with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A master and the live bytes it must equal. `target`: where the optimizer writes them after a step."""

    parameter: Parameter
    master: Tensor
    live: Tensor
    target: Tensor


def mismatches(model: DistributedDataParallel, optimizer: ChainedOptimizer) -> list[str]:
    """Names of local parameters that the optimizer would not continue from, sorted.

    For each master that this rank keeps (all of them, or its shard with the distributed optimizer):
    the master cast to the model's dtype has the bits of the live parameter, and the memory that the optimizer writes
    after a step is the memory that the model reads. The second is what can go wrong in a float32 model, whose masters
    are the parameters themselves: a parameter that was pointed elsewhere would silently stop learning. A trainable
    parameter of which no optimizer knows is a mismatch as well. Shards of the masters on other data-parallel ranks
    are those ranks' to check; that their live parameters are replicas of ours is what digests show.
    """
    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    wrong, known = set(), set()
    for part in optimizer.chained_optimizers:
        for parameter in _parameters(part):
            known.add(parameter)
        for pair in _pairs(part):
            if not (_same_memory(pair.live, pair.target) and _same_bits(pair.master, pair.live)):
                wrong.add(names[pair.parameter])
    wrong.update(name for parameter, name in names.items() if parameter.requires_grad and parameter not in known)
    return sorted(wrong)


def _parameters(part: MegatronOptimizer) -> Iterable[Parameter]:
    if isinstance(part, DistributedOptimizer):
        # A parameter that is wholly another rank's shard is known all the same.
        return [p for buffer in part.buffers for p in buffer.params]
    if isinstance(part, Float16OptimizerWithFloat16Params):
        return [p for groups in (part.float16_groups, part.fp32_from_fp32_groups) for group in groups for p in group]
    return list(part.get_parameters())


def _pairs(part: MegatronOptimizer) -> Iterator[_Pair]:
    if isinstance(part, DistributedOptimizer):
        for live_groups, master_groups in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameter, master in _zip(live_groups, master_groups):
                ranges = part._get_model_param_range_map(parameter)
                buffer, _, bucket = part.model_param_gbuf_map[parameter]
                here, there = ranges["param"], ranges["gbuf_world_in_bucket"]
                yield _Pair(
                    parameter,
                    master,
                    parameter.detach().view(-1)[here.start : here.end],
                    part.buffers[buffer].buckets[bucket].param_data.view(-1)[there.start : there.end],
                )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameter, master in _zip(part.float16_groups, part.fp32_from_float16_groups):
            yield _Pair(parameter, master, parameter.detach(), parameter.detach())


def _zip(live: list[list[Parameter]], masters: list[list[Tensor]]) -> Iterator[tuple[Parameter, Tensor]]:
    for live_group, master_group in zip(live, masters, strict=True):
        yield from zip(live_group, master_group, strict=True)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() == 0 or a.data_ptr() == b.data_ptr()


def _same_bits(master: Tensor, live: Tensor) -> bool:
    bits = _BITS[live.element_size()]
    return torch.equal(master.detach().to(live.dtype).view(bits), live.view(bits))
