"""The last layer of a critic: one number per token, in the place of a language model's logits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

_KEY = "value_head."
"""What its tensors are called in a checkpoint: never what a language model's output layer is called there."""


class ValueHead(MegatronModule):
    """A linear map to one value, whole on every TP rank: each computes the same values and the same gradient.

    Computed in float32 whatever the model's dtype is; never divided by a temperature.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[s, b, hidden] (with sequence parallelism this rank's part of s) to float32 [s, b, 1]."""
        if self.config.sequence_parallel:
            # Every TP rank computes the whole loss: its gradient is split again, not added up.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Under names of its own."""
        own: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        for tensor in own.values():
            tensor.key = _KEY + tensor.key.removeprefix(prefix)
        return own


def is_value_head(part: Any) -> bool:
    """Whether this entry of a sharded state is a tensor of a value head."""
    return isinstance(part, ShardedTensor) and part.key.startswith(_KEY)
