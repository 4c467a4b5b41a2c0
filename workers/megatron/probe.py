"""A gang's answers on a fixed batch: what is compared across a restart (`state/continuity.py`).

Nothing is changed: no byte of any slot, no optimizer state; gradients are zero afterwards.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from state.continuity import Dtype, Probe
from state.machine import SlotMachine
from state.slots import Slot, WeightId
from workers.batch import Sample
from workers.megatron import values
from workers.megatron.forward import gradient_norm, logprobs_of_tokens, score
from workers.megatron.micro_batches import MicroBatch
from workers.megatron.optimizer import TrainOptimizer

SEQUENCES = 8
LENGTH = 16
"""Tokens of each, the first of them a prompt; fewer where the model has fewer positions."""

MAX_TOKENS = SEQUENCES * LENGTH
"""One micro-batch, whatever the run's are: shapes decide about rounding."""


def probe_batch(vocab_size: int, max_positions: int) -> tuple[Sample, ...]:
    """The same tokens in every process of every run on this vocabulary."""
    length = min(LENGTH, max_positions)
    return tuple(_sequence(index, length, vocab_size) for index in range(SEQUENCES))


def take(
    model: DistributedDataParallel,
    optimizer: TrainOptimizer,
    slots: SlotMachine,
    *,
    has_ref: bool,
    dtype: Dtype,
) -> Probe | None:
    """The gang's probe, on the ranks of its last pipeline stage; None on the others. All ranks call it together, with
    the primary resident."""
    samples = probe_batch(model.config.vocab_size, model.module.max_sequence_length)
    own = _answers(model, samples)
    ref = None
    if has_ref:
        with optimizer.gather_off(), slots.borrow(Slot.REF):
            ref = _answers(model, samples)
    # Gradients are summed over data-parallel ranks.
    mine = samples if parallel_state.get_data_parallel_rank() == 0 else ()
    tokens = sum(sample.num_loss_tokens for sample in samples)
    of_tokens = values.of_tokens if model.config.value_head else partial(_logprobs_of, model)
    norm = gradient_norm(model, optimizer, mine, tokens, of_tokens=of_tokens, max_tokens=MAX_TOKENS)
    steps, moments = optimizer.steps_of_adam, optimizer.moment_norms()
    if own is None:
        return None
    return Probe(dtype, own, ref, norm, steps, moments)


def _answers(model: DistributedDataParallel, samples: tuple[Sample, ...]) -> tuple[float, ...] | None:
    """Log-probs of the samples' tokens, or a critic's values."""
    if model.config.value_head:
        found = values.score(model, samples, max_tokens=MAX_TOKENS)
    else:
        scores = score(model, samples, temperature=1.0, max_tokens=MAX_TOKENS)
        found = None if scores is None else scores.logprobs
    return None if found is None else tuple(torch.cat(found).tolist())


def _logprobs_of(model: DistributedDataParallel, output: Tensor, batch: MicroBatch) -> Tensor:
    return logprobs_of_tokens(model, output, batch, 1.0, entropy_gradient=False)[0]


def _sequence(index: int, length: int, vocab_size: int) -> Sample:
    ids = [
        int.from_bytes(hashlib.sha256(f"probe/{index}/{position}".encode()).digest()[:8], "big") % vocab_size
        for position in range(length)
    ]
    return Sample(
        group_id=0,
        index=index,
        prompt_ids=tuple(ids[:1]),
        response_ids=tuple(ids[1:]),
        logprobs=(0.0,) * (length - 1),
        loss_mask=(1,) * (length - 1),
        versions=(WeightId(0, 0),),
        seed=0,
        finish_reason="length",
    )
