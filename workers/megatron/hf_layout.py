"""Which part of which Hugging Face tensor every local parameter holds.

One map serves fingerprints, import, export and publishing. Formats on Megatron's side, per tensor parallel rank:

- `linear_qkv`: rows grouped per key-value head: the query heads of the group, its key, its value; biases likewise;
- `linear_fc1`: the rank's rows of the gate, then its rows of the up projection; of each expert its own;
- embedding and output layer: a block of rows of the padded vocabulary; padding rows belong to no tensor;
- `linear_proj`, `linear_fc2`: a block of columns; norms, routers and a critic's value head are whole on every rank.

Experts have the names of Hugging Face's files, where each stands alone. A tied embedding also stands on the last
pipeline stage, as a replica of the same Hugging Face tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig

from state.digest import Piece
from state.digest_records import Region

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
VALUE_HEAD = ("score.weight", "score.bias")
"""Of a critic: a tensor of its own, under the names that Hugging Face gives such a layer."""


def head_dim(hf_config: PretrainedConfig) -> int:
    """Channels of one attention head; Qwen2's config leaves them to be computed."""
    return hf_config.to_dict().get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads


def is_moe(hf_config: PretrainedConfig) -> bool:
    """Whether its layers have experts."""
    return bool(hf_config.model_type == "qwen3_moe")


def expected_tensors(hf_config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model; a tied output layer is not a tensor of its own."""
    hidden, head = hf_config.hidden_size, head_dim(hf_config)
    queries, keys = hf_config.num_attention_heads * head, hf_config.num_key_value_heads * head
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (hf_config.vocab_size, hidden)}
    for index in range(hf_config.num_hidden_layers):
        layer = _layer_prefix(index)
        tensors[layer + "input_layernorm.weight"] = (hidden,)
        tensors[layer + "self_attn.q_proj.weight"] = (queries, hidden)
        tensors[layer + "self_attn.k_proj.weight"] = (keys, hidden)
        tensors[layer + "self_attn.v_proj.weight"] = (keys, hidden)
        tensors[layer + "self_attn.o_proj.weight"] = (hidden, queries)
        if hf_config.model_type == "qwen2":
            tensors[layer + "self_attn.q_proj.bias"] = (queries,)
            tensors[layer + "self_attn.k_proj.bias"] = (keys,)
            tensors[layer + "self_attn.v_proj.bias"] = (keys,)
        if hf_config.model_type in ("qwen3", "qwen3_moe"):
            tensors[layer + "self_attn.q_norm.weight"] = (head,)
            tensors[layer + "self_attn.k_norm.weight"] = (head,)
        tensors[layer + "post_attention_layernorm.weight"] = (hidden,)
        if is_moe(hf_config):
            tensors[layer + "mlp.gate.weight"] = (hf_config.num_experts, hidden)
            for expert in range(hf_config.num_experts):
                tensors |= _mlp(f"{layer}mlp.experts.{expert}.", hidden, hf_config.moe_intermediate_size)
        else:
            tensors |= _mlp(layer + "mlp.", hidden, hf_config.intermediate_size)
    tensors[FINAL_NORM] = (hidden,)
    if not hf_config.tie_word_embeddings:
        tensors[LM_HEAD] = (hf_config.vocab_size, hidden)
    return tensors


def _mlp(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (ffn, hidden),
        prefix + "up_proj.weight": (ffn, hidden),
        prefix + "down_proj.weight": (hidden, ffn),
    }


def box(region: Region) -> tuple[slice, ...]:
    """The region as an index into its full tensor."""
    return tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))


def bare(model: nn.Module) -> GPTModel:
    """The GPTModel inside Megatron's wrappers (data parallel, float16)."""
    while not isinstance(model, GPTModel):
        inner = model._modules.get("module")
        if inner is None:
            raise TypeError(f"{type(model).__name__} is not a GPTModel and wraps none")
        model = inner
    return model


class GptWeights:
    """The live weights of this rank's stage. Every call looks at the parameters' current `.data`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = bare(model)
        self._tp = parallel_state.get_tensor_model_parallel_world_size()
        self._tp_rank = parallel_state.get_tensor_model_parallel_rank()

    @property
    def hf_config(self) -> PretrainedConfig:
        """The Hugging Face config of the whole model."""
        return self._model.config.hf

    def tensors(self) -> Mapping[str, Tensor]:
        """All parameters and persistent buffers by their name in the bare model."""
        tensors: dict[str, Tensor] = dict(self._model.named_parameters())
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    tensors[f"{prefix}.{name}" if prefix else name] = buffer
        return tensors

    def pieces(self) -> Iterator[Piece]:
        """Views of live memory that together are everything this rank holds of the Hugging Face model."""
        model = self._model
        if model.pre_process:
            yield from self._vocab_rows(EMBEDDING, model.embedding.word_embeddings.weight)
        for layer in model.decoder.layers:
            yield from self._layer(layer)
        if model.post_process:
            yield _whole(FINAL_NORM, model.decoder.final_layernorm.weight)
            if model.config.value_head:
                yield from map(_whole, VALUE_HEAD, (model.output_layer.weight, model.output_layer.bias))
                return
            tied = model.share_embeddings_and_output_weights
            if not (tied and model.pre_process):
                yield from self._vocab_rows(EMBEDDING if tied else LM_HEAD, model.output_layer.weight)

    def _layer(self, layer: TransformerLayer) -> Iterator[Piece]:
        prefix = _layer_prefix(layer.layer_number - 1)
        attention, mlp = layer.self_attention, layer.mlp
        yield _whole(prefix + "input_layernorm.weight", layer.input_layernorm.weight)
        yield from self._qkv(prefix + "self_attn.", "weight", attention.linear_qkv.weight)
        if self._model.config.add_qkv_bias:
            yield from self._qkv(prefix + "self_attn.", "bias", attention.linear_qkv.bias)
        if self._model.config.qk_layernorm:
            yield _whole(prefix + "self_attn.q_norm.weight", attention.q_layernorm.weight)
            yield _whole(prefix + "self_attn.k_norm.weight", attention.k_layernorm.weight)
        yield self._columns(prefix + "self_attn.o_proj.weight", attention.linear_proj.weight)
        yield _whole(prefix + "post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight)
        if isinstance(mlp, MoELayer):
            yield _whole(prefix + "mlp.gate.weight", mlp.router.weight)
            for number, expert in enumerate(mlp.experts.local_experts):
                yield from self._mlp(f"{prefix}mlp.experts.{number}.", expert)
        else:
            yield from self._mlp(prefix + "mlp.", mlp)

    def _mlp(self, prefix: str, mlp: MLP) -> Iterator[Piece]:
        rows = mlp.linear_fc1.weight.shape[0] // 2
        gate, up = mlp.linear_fc1.weight.data[:rows], mlp.linear_fc1.weight.data[rows:]
        yield _rows(prefix + "gate_proj.weight", gate, rows * self._tp, rows * self._tp_rank)
        yield _rows(prefix + "up_proj.weight", up, rows * self._tp, rows * self._tp_rank)
        yield self._columns(prefix + "down_proj.weight", mlp.linear_fc2.weight)

    def _qkv(self, prefix: str, what: str, fused: Tensor) -> Iterator[Piece]:
        config = self._model.config
        head, groups = config.kv_channels, config.num_query_groups
        query_rows = config.num_attention_heads // groups * head
        group_rows = query_rows + 2 * head
        local_groups = groups // self._tp
        for local in range(local_groups):
            group = self._tp_rank * local_groups + local
            rows = fused.data[local * group_rows : (local + 1) * group_rows]
            yield _rows(f"{prefix}q_proj.{what}", rows[:query_rows], groups * query_rows, group * query_rows)
            yield _rows(f"{prefix}k_proj.{what}", rows[query_rows:-head], groups * head, group * head)
            yield _rows(f"{prefix}v_proj.{what}", rows[-head:], groups * head, group * head)

    def _vocab_rows(self, name: str, weight: Tensor) -> Iterator[Piece]:
        vocab, start = self._model.config.vocab_size, self._tp_rank * weight.shape[0]
        rows = min(weight.shape[0], vocab - start)
        if rows > 0:
            yield _rows(name, weight.data[:rows], vocab, start)

    def _columns(self, name: str, weight: Tensor) -> Piece:
        rows, columns = weight.shape
        region = Region((rows, columns * self._tp), (0, columns * self._tp_rank), (rows, columns))
        return Piece(name, region, weight.data)


def _layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def _whole(name: str, weight: Tensor) -> Piece:
    return Piece(name, Region.whole(weight.shape), weight.data)


def _rows(name: str, rows: Tensor, of: int, start: int) -> Piece:
    others = tuple(rows.shape[1:])
    return Piece(name, Region((of, *others), (start, *(0 for _ in others)), (rows.shape[0], *others)), rows)
