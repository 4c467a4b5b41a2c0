"""How samples are grouped for one pass through the model, and padded into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch import Sample


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group samples of these lengths (prompt and response together) so that no group has more than `max_tokens`
    when padded to its longest member; a longer sample goes alone.

    Returns positions in `lengths`; each occurs once. Longest first, so that groups hold samples of like length;
    depends on nothing but the arguments.
    """
    groups: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
            longest = lengths[position]
    return groups


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples padded on the right. `ids`, `positions`: int64 [b, s].

    `rows`, `targets`: int64 [n], one entry per response token, sample after sample: the row of the flattened
    [b x s, vocab] logits that predicts it, and the token. `lengths`: response tokens of each sample; they add up to n.
    `members`: where these samples stand in the caller's sequence.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    lengths: tuple[int, ...]
    members: tuple[int, ...]


def collate(samples: Sequence[Sample], members: Sequence[int], device: torch.device, multiple_of: int) -> MicroBatch:
    """Pad `samples[i] for i in members` to the longest of them, rounded up to `multiple_of` tokens.

    Padding stands to the right of every real token, where causal attention never looks. Without members it is a batch
    of padding alone: a rank that has no samples still takes part in what its gang computes together.

    Raises:
        ValueError: a sample with an empty prompt; nothing predicts its first token.
    """
    chosen = [samples[i] for i in members]
    for sample in chosen:
        if not sample.prompt_ids:
            raise ValueError(
                f"sample {sample.group_id}/{sample.index} has an empty prompt: nothing predicts its tokens"
            )
    longest = max((sample.num_tokens for sample in chosen), default=1)
    width = -(-longest // multiple_of) * multiple_of
    ids = torch.zeros(max(1, len(chosen)), width, dtype=torch.int64)
    rows: list[int] = []
    targets: list[int] = []
    for row, sample in enumerate(chosen):
        ids[row, : sample.num_tokens] = torch.tensor(sample.prompt_ids + sample.response_ids)
        first = row * width + len(sample.prompt_ids) - 1
        rows.extend(range(first, first + len(sample.response_ids)))
        targets.extend(sample.response_ids)
    return MicroBatch(
        ids=ids.to(device),
        positions=torch.arange(width, device=device).expand(ids.shape).contiguous(),
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        lengths=tuple(len(sample.response_ids) for sample in chosen),
        members=tuple(members),
    )


def plan(samples: Sequence[Sample], max_tokens: int, device: torch.device, multiple_of: int) -> list[MicroBatch]:
    """All micro-batches of some samples, never none at all."""
    groups = split([sample.num_tokens for sample in samples], max_tokens) or [[]]
    return [collate(samples, group, device, multiple_of) for group in groups]
