"""Which of Megatron's own options can be passed through. Pure, but for reading Megatron's sources."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.checks import megatron_fields
from orchestrator.config import Config
from orchestrator.options.load import nearest
from orchestrator.options.problems import Problem


def check(config: Config) -> Iterator[Problem]:
    """`train.megatron`: fields that there are, with values of their types, that do not undo what Slotwise decides."""
    if not config.train.megatron:
        return
    known = megatron_fields.fields()
    if known is None:
        yield Problem("train.megatron", "cannot be checked: megatron-core is not installed")
        return
    for key, value in config.train.megatron.items():
        dotted = f"train.megatron.{key}"
        if key not in known:
            near = nearest(key, known)
            yield Problem(dotted, f"Megatron's configs have no field {key!r}{near}")
        elif key == "expert_model_parallel_size":
            if value != 1:
                yield Problem(
                    dotted,
                    f"given {value!r}; only 1 is offered: ranks that share experts have to run equally many "
                    "micro-batches, and data-parallel ranks here run as many as their samples need. Use "
                    "train.tensor_model_parallel_size, which splits every expert",
                )
        elif key in megatron_fields.DECIDED:
            instead = megatron_fields.DECIDED[key]
            yield Problem(
                dotted, f"is set by Slotwise; use {instead}" if instead else "is set by Slotwise; leave it out"
            )
        elif not megatron_fields.accepts(known[key], value):
            yield Problem(dotted, f"given {value!r}; accepted: {known[key]}")
        elif key in ("use_precision_aware_optimizer", "optimizer_cpu_offload") and value:
            yield Problem(dotted, "keeps master weights where they cannot be compared with the live ones; leave it out")
        elif key == "overlap_param_gather" and value and not config.train.use_distributed_optimizer:
            yield Problem(dotted, "needs train.use_distributed_optimizer")
        elif "cuda_graph" in key and value and (moving := _moves_weights(config)):
            yield Problem(dotted, f"CUDA graphs keep the addresses of weights, which {moving}")


def _moves_weights(config: Config) -> str | None:
    """What makes live weights stand elsewhere, and what to use instead."""
    if config.algorithm.needs_ref and config.ref.tier == "device":
        return "ref.tier device moves; use ref.tier copy"
    if config.algorithm.use_opd and config.teacher.tier == "device":
        return "teacher.tier device moves; use teacher.tier copy"
    if config.cluster.offload_train:
        return "cluster.offload_train frees; leave that out"
    return None
