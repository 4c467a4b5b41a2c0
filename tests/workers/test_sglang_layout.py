"""The map from SGLang's fused, split and padded parameters to named tensors, and the digests that come of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from state.digest import digest_pieces, digest_tensor
from workers.rollout.protocol import WeightsMismatch, mismatches
from workers.rollout.sglang_layout import Shape, UnknownLayout, pieces
from workers.rollout.sglang_plugin import write_piece
from workers.rollout.sglang_proof import compose

QWEN3 = Shape("Qwen3ForCausalLM", 37, 16, 24, 2, 8, 4, 6, tied=True, tp_rank=0, tp_size=1)
SHAPES = {
    "qwen3-tied": QWEN3,
    "qwen3-untied": replace(QWEN3, tied=False),
    "qwen2-tied": replace(QWEN3, architecture="Qwen2ForCausalLM"),
    "llama-untied": replace(QWEN3, architecture="LlamaForCausalLM", tied=False),
    "qwen3-moe": replace(QWEN3, architecture="Qwen3MoeForCausalLM", tied=False, experts=3),
}
PADDED_VOCAB = 64


def whole_model(shape: Shape) -> dict[str, Tensor]:
    """Hugging Face tensors."""
    g = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        sizes |= {layer + f"{n}_layernorm.weight": (shape.hidden,) for n in ("input", "post_attention")}
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            sizes[layer + f"self_attn.{name}_proj.weight"] = (heads * shape.head_dim, shape.hidden)
            if shape.architecture == "Qwen2ForCausalLM":
                sizes[layer + f"self_attn.{name}_proj.bias"] = (heads * shape.head_dim,)
        sizes[layer + "self_attn.o_proj.weight"] = (shape.hidden, shape.heads * shape.head_dim)
        if shape.architecture.startswith("Qwen3"):
            sizes |= {layer + f"self_attn.{n}_norm.weight": (shape.head_dim,) for n in "qk"}
        if shape.experts:
            sizes[layer + "mlp.gate.weight"] = (shape.experts, shape.hidden)
        for mlp in [f"mlp.experts.{e}" for e in range(shape.experts)] or ["mlp"]:
            sizes |= {layer + f"{mlp}.{n}_proj.weight": (shape.ffn, shape.hidden) for n in ("gate", "up")}
            sizes[layer + f"{mlp}.down_proj.weight"] = (shape.hidden, shape.ffn)
    return {name: torch.randn(size, generator=g) for name, size in sizes.items()}


def as_sglang_holds(model: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """What one rank holds, written down independently of the map: chunks, fused, with garbage as padding."""
    rank, size = shape.tp_rank, shape.tp_size
    copies = max(1, size // shape.kv_heads)

    def vocab(weight: Tensor) -> Tensor:
        padding = torch.full((PADDED_VOCAB - shape.vocab, shape.hidden), 7.0)
        return torch.cat([weight, padding]).chunk(size)[rank]

    held: dict[str, Tensor] = {}
    for name, weight in model.items():
        module, _, kind = name.rpartition(".")
        prefix, _, last = module.rpartition(".")
        match last:
            case "embed_tokens" | "lm_head":
                held[name] = vocab(weight)
            case "q_proj":
                keys = [model[f"{prefix}.{n}_proj.{kind}"].chunk(size // copies)[rank // copies] for n in "kv"]
                held[f"{prefix}.qkv_proj.{kind}"] = torch.cat([weight.chunk(size)[rank], *keys])
            case "gate_proj":
                up = model[f"{prefix}.up_proj.weight"].chunk(size)[rank]
                held[f"{prefix}.gate_up_proj.weight"] = torch.cat([weight.chunk(size)[rank], up])
            case "o_proj" | "down_proj":
                held[name] = weight.chunk(size, dim=1)[rank]
            case "k_proj" | "v_proj" | "up_proj":
                pass
            case _:
                held[name] = weight
    for i in range(shape.layers if shape.experts else 0):
        prefix = f"model.layers.{i}.mlp.experts."
        for theirs, ours in (("w13_weight", "gate_up_proj.weight"), ("w2_weight", "down_proj.weight")):
            held[prefix + theirs] = torch.stack([held.pop(f"{prefix}{e}.{ours}") for e in range(shape.experts)])
    return held


def answers(model: dict[str, Tensor], shape: Shape, *, newer: bool = True) -> list[dict[str, Any]]:
    """Of each rank's weight checker."""
    found = []
    for rank in range(shape.tp_size):
        mine = replace(shape, tp_rank=rank)
        digest = digest_pieces(pieces(as_sglang_holds(model, mine), mine))
        lines = {write_piece(piece): f"{piece.value:016x}" for piece in digest.pieces}
        who = {"tp_rank": rank}
        found.append({"checksums": lines, "parallelism_info": [who] if newer else who})
    return found


@pytest.mark.parametrize("newer", [True, False], ids=["0.5.23", "0.5.17"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_digests_of_every_split_add_up_to_those_of_the_named_tensors(shape: Shape, tp_size: int, newer: bool) -> None:
    """With 8 ranks two of them hold each of the 4 key-value heads."""
    model = whole_model(shape)
    expected = [digest_tensor(name, tensor) for name, tensor in sorted(model.items())]
    held = compose(answers(model, replace(shape, tp_size=tp_size), newer=newer), tp_size)
    assert mismatches(expected, held) == ()


@pytest.mark.parametrize("tp_size", [1, 8])
def test_one_flipped_bit_in_a_fused_tensor_is_found_under_its_name(tp_size: int) -> None:
    shape = replace(QWEN3, tp_size=tp_size)
    model = whole_model(shape)
    expected = [digest_tensor(name, tensor) for name, tensor in sorted(model.items())]
    name = "model.layers.1.mlp.up_proj.weight"
    model[name].view(torch.int32)[-1, -1] ^= 1
    (difference,) = mismatches(expected, compose(answers(model, shape), tp_size))
    assert difference.startswith(name)


def test_ranks_of_one_engine_that_hold_different_norms_are_found() -> None:
    shape = replace(QWEN3, tp_size=2)
    first, second = answers(whole_model(shape), shape)
    other = whole_model(shape)
    other["model.norm.weight"] += 1
    second["checksums"] |= answers(other, shape)[1]["checksums"]
    with pytest.raises(WeightsMismatch, match=r"hold different bytes of model\.norm\.weight"):
        compose([first, second], 2)


def test_a_rank_that_does_not_answer_is_missed() -> None:
    shape = replace(QWEN3, tp_size=2)
    first, _ = answers(whole_model(shape), shape)
    with pytest.raises(WeightsMismatch, match=r"came from tensor parallel ranks \[0\], wanted all of 2"):
        compose([first], 2)


def test_a_piece_that_no_rank_holds_is_missed() -> None:
    shape = replace(QWEN3, tp_size=2)
    first, second = answers(whole_model(shape), shape)
    second["checksums"] = {k: v for k, v in second["checksums"].items() if "down_proj" not in k}
    with pytest.raises(WeightsMismatch, match=r"holds 192 of 384 elements of model\.layers\.0\.mlp\.down_proj"):
        compose([first, second], 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.0.self_attn.qkv_proj.bias": torch.zeros(8)}, r"qkv_proj\.bias, which no map says"),
        ({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(48, 8)}, r"\[48, 8\] in the engine, expected \[48, 16"),
        ({"model.norm.weight": None}, r"the engine has no model\.norm\.weight"),
        ({"model.embed_tokens.weight": torch.zeros(36, 16)}, "36 rows on each of 1 ranks, for a vocabulary of 37"),
    ],
    ids=["unknown", "reshaped", "missing", "too small"],
)
def test_what_the_map_does_not_describe_is_refused(change: dict[str, Tensor | None], words: str) -> None:
    held = as_sglang_holds(whole_model(QWEN3), QWEN3) | change
    with pytest.raises(UnknownLayout, match=words):
        pieces({name: tensor for name, tensor in held.items() if tensor is not None}, QWEN3)


def test_an_architecture_without_a_map_is_refused() -> None:
    shape = replace(QWEN3, architecture="Qwen2MoeForCausalLM")
    with pytest.raises(UnknownLayout, match="no map for Qwen2MoeForCausalLM; there is one for Llama"):
        pieces({}, shape)
