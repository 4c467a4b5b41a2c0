"""The map between live parameters and Hugging Face tensors: names, exact cover on every layout, current memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from torch import nn
from transformers import AutoModelForCausalLM

from state.digest import digest_tensor
from state.digest_records import Region, TensorDigest
from tests.workers.gang_processes import run_gang
from tests.workers.megatron_jobs import LAYOUTS, Held
from tests.workers.tiny_models import TINY, tiny
from workers.megatron import random_init
from workers.megatron.hf_layout import GptWeights, bare, box, expected_tensors
from workers.megatron.model import load_hf_config
from workers.rollout.transformers_layout import named_tensors

SEED = 5
MODELS = {name: tiny(name) for name in TINY}


def summed(ranks: list[Held]) -> dict[str, TensorDigest]:
    """Digests of whole tensors from shards, one of each set of replicas; fails unless the regions tile every tensor."""
    values: dict[str, dict[Region, tuple[str, int]]] = defaultdict(dict)
    for rank in ranks:
        for piece in rank.pieces:
            known = values[piece.name].setdefault(piece.region, (piece.dtype, piece.value))
            assert known == (piece.dtype, piece.value), f"replicas of {piece.name} differ on rank {rank.at.rank}"
    whole = {}
    for name, regions in values.items():
        shape = next(iter(regions)).full_shape
        covered = torch.zeros(shape, dtype=torch.int32)
        for region in regions:
            covered[box(region)] += 1
        assert bool((covered == 1).all()), f"{name} is not covered exactly once"
        dtype = next(iter(regions.values()))[0]
        whole[name] = TensorDigest(name, dtype, shape, sum(value for _, value in regions.values()) % 2**64)
    return whole


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    hf_config = load_hf_config(MODELS[name])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf_config)
    assert expected_tensors(hf_config) == {name: tuple(p.shape) for name, p in named_tensors(theirs).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_tile_every_tensor_and_one_seed_gives_one_model_on_every_layout(layout: str) -> None:
    ranks = run_gang("tests.workers.megatron_jobs:held", LAYOUTS[layout].world_size, (LAYOUTS[layout], MODELS, SEED))
    for name, model in MODELS.items():
        hf_config = load_hf_config(model)
        digests = summed([rank[name] for rank in ranks])
        assert digests == {
            tensor: digest_tensor(tensor, random_init.draw(tensor, shape, SEED, hf_config.initializer_range))
            for tensor, shape in expected_tensors(hf_config).items()
        }
        for rank in ranks:
            assert sum(piece.region.numel for piece in rank[name].pieces) == rank[name].local_elements


def test_random_weights_depend_on_the_seed_and_the_name() -> None:
    draw = random_init.draw("a", (4, 4), 1, 0.02)
    assert torch.equal(draw, random_init.draw("a", (4, 4), 1, 0.02))
    assert not torch.equal(draw, random_init.draw("b", (4, 4), 1, 0.02))
    assert not torch.equal(draw, random_init.draw("a", (4, 4), 2, 0.02))
    assert random_init.draw("norm.weight", (4,), 1, 0.02).tolist() == [1.0] * 4
    assert random_init.draw("q_proj.bias", (4,), 1, 0.02).tolist() == [0.0] * 4


def swap_and_look(gpt: GPTModel) -> bool:
    weights = GptWeights(gpt)
    for tensor in weights.tensors().values():
        tensor.data = torch.full_like(tensor, 7.0)
    return all(bool((piece.tensor == 7.0).all()) for piece in weights.pieces())


def test_pieces_are_views_of_current_memory_when_pointers_are_swapped() -> None:
    assert run_gang("tests.workers.megatron_jobs:on_one_rank", 1, (swap_and_look, MODELS["qwen3-untied"])) == [True]


def write_through_pieces(gpt: GPTModel) -> bool:
    weights = GptWeights(gpt)
    for piece in weights.pieces():
        piece.tensor.fill_(3.0)
    rows = gpt.config.vocab_size
    return all(
        bool((tensor[: rows if "embed" in name or "output" in name else None] == 3.0).all())
        for name, tensor in weights.tensors().items()
    )


def test_writing_to_pieces_fills_the_model() -> None:
    assert run_gang("tests.workers.megatron_jobs:on_one_rank", 1, (write_through_pieces, MODELS["llama-untied"])) == [
        True
    ]


def wrap(gpt: GPTModel) -> tuple[bool, bool]:
    wrapped = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    same = list(GptWeights(wrapped).tensors()) == list(GptWeights(gpt).tensors())
    return bare(wrapped) is gpt, same


def test_the_bare_model_is_found_inside_megatrons_wrappers() -> None:
    assert run_gang("tests.workers.megatron_jobs:on_one_rank", 1, (wrap, MODELS["qwen3-tied"])) == [(True, True)]


def test_what_is_no_gpt_model_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not a GPTModel"):
        bare(nn.Linear(1, 1))
