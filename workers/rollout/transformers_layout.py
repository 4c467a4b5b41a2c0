"""Which Hugging Face tensors the parameters of a transformers model hold.

In memory they have the names of the files, but for experts: there all of a layer are fused, `experts.gate_up_proj`
[experts, 2 x ffn, hidden] and `experts.down_proj` [experts, hidden, ffn], while in files each stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedModel

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def named_tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Views of parameters and persistent buffers by their name in files; a tied tensor once, by the name of its first
    use."""
    parameters = dict(model.named_parameters(remove_duplicate=True))
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in every_name}
    return {name: view for held in {**parameters, **buffers}.items() for name, view in _apart(*held)}


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(_GATE_UP):
        prefix, rows = name.removesuffix(_GATE_UP), tensor.shape[1] // 2
        for number, expert in enumerate(tensor.data):
            yield f"{prefix}.experts.{number}.gate_proj.weight", expert[:rows]
            yield f"{prefix}.experts.{number}.up_proj.weight", expert[rows:]
    elif name.endswith(_DOWN):
        for number, expert in enumerate(tensor.data):
            yield f"{name.removesuffix(_DOWN)}.experts.{number}.down_proj.weight", expert
    else:
        yield name, tensor
