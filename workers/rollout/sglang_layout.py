"""Which part of which Hugging Face tensor every parameter of an SGLang model holds.

SGLang fuses and splits, per tensor parallel rank:

- `qkv_proj`: the rank's rows of the queries, then of the keys, then of the values; with more ranks than key-value
  heads, several ranks hold the same head;
- `gate_up_proj`: the rank's rows of the gate, then of the up projection;
- `experts.w13_weight`, `experts.w2_weight`: of all experts, in order, what `gate_up_proj` and `down_proj` hold of one;
- `embed_tokens`, `lm_head`: a block of rows of the padded vocabulary; padding belongs to no tensor;
- `o_proj`, `down_proj`: a block of columns; norms and routers are whole on every rank.

A tied output layer is the embedding itself. What is not described here has no proof: `UnknownLayout`.

Imports torch and `state.digest` alone, so that it runs inside the engine's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from state.digest import Piece
from state.digest_records import Region

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
EXPERTS = ("Qwen3MoeForCausalLM",)
QKV_BIAS = ("Qwen2ForCausalLM",)


class UnknownLayout(Exception):
    """What the engine holds cannot be told apart into named tensors; the message says which parameter."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the whole model, and this process's place in it. `ffn` is of one expert where there are `experts`."""

    architecture: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    tp_rank: int
    tp_size: int
    experts: int = 0


def pieces(tensors: Mapping[str, Tensor], shape: Shape) -> list[Piece]:
    """Everything that `tensors` (by SGLang's names) hold of the Hugging Face model. Pure: looks at names and shapes.

    `UnknownLayout` names what is missing, unknown, or of another shape than this map says.
    """
    if shape.architecture not in ARCHITECTURES:
        raise UnknownLayout(f"no map for {shape.architecture}; there is one for {', '.join(ARCHITECTURES)}")
    if shape.heads % shape.tp_size or shape.ffn % shape.tp_size:
        raise UnknownLayout(f"{shape.heads} heads or {shape.ffn} rows of the MLP do not split over {shape.tp_size}")
    if max(shape.kv_heads, shape.tp_size) % min(shape.kv_heads, shape.tp_size):
        raise UnknownLayout(f"{shape.kv_heads} key-value heads do not split over {shape.tp_size} ranks")
    reader = _Reader(tensors)
    found = list(_model(reader, shape))
    if unknown := sorted(tensors.keys() - reader.seen):
        raise UnknownLayout(f"the engine holds {', '.join(unknown)}, which no map says the contents of")
    return found


class _Reader:
    """Hands out parameters and remembers which."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.seen: set[str] = set()

    def take(self, name: str, *shape: int | None) -> Tensor:
        """The parameter, which must have this shape (None: any size)."""
        if name not in self._tensors:
            raise UnknownLayout(f"the engine has no {name}")
        tensor = self._tensors[name]
        same = len(shape) == tensor.dim() and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not same:
            expected = ["any" if n is None else n for n in shape]
            raise UnknownLayout(f"{name} is {list(tensor.shape)} in the engine, expected {expected}")
        self.seen.add(name)
        return tensor


def _model(read: _Reader, shape: Shape) -> Iterator[Piece]:
    yield from _vocabulary(read, "model.embed_tokens.weight", shape)
    for index in range(shape.layers):
        yield from _layer(read, f"model.layers.{index}.", shape)
    yield _whole("model.norm.weight", read.take("model.norm.weight", shape.hidden))
    if not shape.tied:
        yield from _vocabulary(read, "lm_head.weight", shape)


def _layer(read: _Reader, prefix: str, shape: Shape) -> Iterator[Piece]:
    size, hidden = shape.tp_size, shape.hidden
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield _whole(prefix + norm, read.take(prefix + norm, hidden))
    yield from _qkv(read, prefix + "self_attn.", shape)
    if shape.architecture in QK_NORM:
        for norm in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield _whole(prefix + norm, read.take(prefix + norm, shape.head_dim))
    columns = shape.heads // size * shape.head_dim
    output = prefix + "self_attn.o_proj.weight"
    yield _columns(output, read.take(output, hidden, columns), shape)
    rows = shape.ffn // size
    if shape.architecture not in EXPERTS:
        fused = read.take(prefix + "mlp.gate_up_proj.weight", 2 * rows, hidden)
        yield from _mlp(prefix + "mlp.", fused, read.take(prefix + "mlp.down_proj.weight", hidden, rows), shape)
        return
    yield _whole(prefix + "mlp.gate.weight", read.take(prefix + "mlp.gate.weight", shape.experts, hidden))
    ups = read.take(prefix + "mlp.experts.w13_weight", shape.experts, 2 * rows, hidden)
    downs = read.take(prefix + "mlp.experts.w2_weight", shape.experts, hidden, rows)
    for number, (fused, down) in enumerate(zip(ups, downs, strict=True)):
        yield from _mlp(f"{prefix}mlp.experts.{number}.", fused, down, shape)


def _mlp(prefix: str, fused: Tensor, down: Tensor, shape: Shape) -> Iterator[Piece]:
    rows = fused.shape[0] // 2
    yield _rows(prefix + "gate_proj.weight", fused[:rows], shape.ffn, shape.tp_rank * rows)
    yield _rows(prefix + "up_proj.weight", fused[rows:], shape.ffn, shape.tp_rank * rows)
    yield _columns(prefix + "down_proj.weight", down, shape)


def _qkv(read: _Reader, prefix: str, shape: Shape) -> Iterator[Piece]:
    queries = shape.heads // shape.tp_size * shape.head_dim
    keys = max(1, shape.kv_heads // shape.tp_size) * shape.head_dim
    replicas = max(1, shape.tp_size // shape.kv_heads)
    all_keys, start = shape.kv_heads * shape.head_dim, shape.tp_rank // replicas * keys
    kinds = {"weight": (shape.hidden,)} | ({"bias": ()} if shape.architecture in QKV_BIAS else {})
    for kind, columns in kinds.items():
        fused = read.take(f"{prefix}qkv_proj.{kind}", queries + 2 * keys, *columns)
        all_queries = shape.heads * shape.head_dim
        yield _rows(f"{prefix}q_proj.{kind}", fused[:queries], all_queries, shape.tp_rank * queries)
        yield _rows(f"{prefix}k_proj.{kind}", fused[queries : queries + keys], all_keys, start)
        yield _rows(f"{prefix}v_proj.{kind}", fused[queries + keys :], all_keys, start)


def _vocabulary(read: _Reader, name: str, shape: Shape) -> Iterator[Piece]:
    weight = read.take(name, None, shape.hidden)
    if weight.shape[0] * shape.tp_size < shape.vocab:
        raise UnknownLayout(
            f"{name} has {weight.shape[0]} rows on each of {shape.tp_size} ranks, for a vocabulary of {shape.vocab}"
        )
    start = shape.tp_rank * weight.shape[0]
    rows = min(weight.shape[0], shape.vocab - start)
    if rows > 0:
        yield _rows(name, weight[:rows], shape.vocab, start)


def _whole(name: str, weight: Tensor) -> Piece:
    return Piece(name, Region.whole(weight.shape), weight)


def _rows(name: str, rows: Tensor, of: int, start: int) -> Piece:
    rest = tuple(rows.shape[1:])
    return Piece(name, Region((of, *rest), (start, *[0] * len(rest)), tuple(rows.shape)), rows)


def _columns(name: str, weight: Tensor, shape: Shape) -> Piece:
    rows, columns = weight.shape
    return Piece(name, Region((rows, columns * shape.tp_size), (0, columns * shape.tp_rank), (rows, columns)), weight)
