"""Hugging Face directories into live weights and out again: bit-equal, and by name when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from state.digest import Piece
from state.digest_records import Region
from state.errors import CheckpointError
from tests.workers.gang_processes import GangFailed, Place, run_gang
from tests.workers.megatron_jobs import LAYOUTS, gang
from tests.workers.tiny_models import tiny
from workers.config import ModelConfig
from workers.megatron.hf_io import INDEX, SINGLE_FILE, HuggingFaceError, assemble, load_huggingface, save_huggingface
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout

ONE = Layout(1)
TIED, UNTIED, BIASED = tiny("qwen3-tied"), tiny("llama-untied"), tiny("qwen2-tied")


@pytest.fixture(scope="module", autouse=True)
def gang_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gang(Place(0, 1, f"file://{tmp_path_factory.mktemp('gang')}/rendezvous"), ONE):
        yield


def theirs(model: ModelConfig) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """A transformers model of that config with random weights: its config and its tensors."""
    torch.manual_seed(1)
    hf_config = load_hf_config(model)
    hf_model = AutoModelForCausalLM.from_config(hf_config)
    return hf_config, {name: p.detach() for name, p in hf_model.named_parameters()}


def zeros(model: ModelConfig) -> tuple[GPTModel, GptWeights]:
    gpt = build(load_hf_config(model), ONE, model, {}, seed=None)
    return gpt, GptWeights(gpt)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model", [TIED, UNTIED, BIASED], ids=["tied", "untied", "with biases"])
@pytest.mark.parametrize("shards", ["one file", "sharded"])
def test_a_directory_of_transformers_comes_out_bit_equal(model: ModelConfig, shards: str, tmp_path: Path) -> None:
    hf_config, expected = theirs(model)
    source = AutoModelForCausalLM.from_config(hf_config)
    source.load_state_dict(expected, strict=False)
    source.save_pretrained(tmp_path / "in", **({"max_shard_size": "6KB"} if shards == "sharded" else {}))
    assert (tmp_path / "in" / INDEX).exists() == (shards == "sharded")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")

    _, weights = zeros(model)
    load_huggingface(weights, tmp_path / "in")
    save_huggingface(
        weights,
        tmp_path / "out",
        files_from=tmp_path / "in",
        shard_bytes=6000 if shards == "sharded" else 1 << 30,
    )

    written = tensors_of(tmp_path / "out")
    assert (tmp_path / "out" / INDEX).exists() == (shards == "sharded")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(12).view(2, 6)
    assert reloaded.dtype == torch.float32
    assert torch.equal(reloaded(ids).logits, source(ids).logits)


def test_values_are_rounded_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    _, expected = theirs(UNTIED)
    save_file(expected, tmp_path / SINGLE_FILE)
    _, weights = zeros(UNTIED.model_copy(update={"dtype": "bfloat16"}))
    load_huggingface(weights, tmp_path)
    save_huggingface(weights, tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_copy_of_the_embedding_and_computed_rope_tables_are_passed_over(tmp_path: Path) -> None:
    _, expected = theirs(TIED)
    surplus = {
        "lm_head.weight": expected["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    save_file(expected | surplus, tmp_path / SINGLE_FILE)
    load_huggingface(zeros(TIED)[1], tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"
Damage = Callable[[dict[str, Tensor]], None]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(Q), f"{Q} is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}), "layers.2.mlp.up_proj.weight is no"),
        (lambda t: t.update({Q: torch.ones(48, 15)}), rf"{Q} has shape \(48, 15\), the model's is \(48, 16\)"),
        (lambda t: t.update({Q: torch.ones(48, 16, dtype=torch.int8)}), f"{Q} is stored as I8"),
    ],
)
def test_what_is_wrong_with_a_directory_is_said_by_name_before_anything_is_written(
    damage: Damage, message: str, tmp_path: Path
) -> None:
    _, tensors = theirs(UNTIED)
    damage(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    gpt, weights = zeros(UNTIED)
    with pytest.raises(HuggingFaceError, match=message):
        load_huggingface(weights, tmp_path)
    assert all(bool((parameter == 0).all()) for parameter in gpt.parameters())


def test_files_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    _, weights = zeros(UNTIED)
    with pytest.raises(HuggingFaceError, match="only safetensors are read"):
        load_huggingface(weights, tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(b"\x10")
    with pytest.raises(HuggingFaceError, match=f"{SINGLE_FILE} is not a whole safetensors file"):
        load_huggingface(weights, tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"lm_head.weight": "part.safetensors"}}')
    with pytest.raises(HuggingFaceError, match=r"part\.safetensors is missing"):
        load_huggingface(weights, tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": ')
    with pytest.raises(HuggingFaceError, match=f"{INDEX} is not a whole index"):
        load_huggingface(weights, tmp_path)


def test_nothing_is_written_over_and_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, weights = zeros(TIED)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_huggingface(weights, taken)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("workers.megatron.hf_io.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save_huggingface(weights, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def save_a_shard(place: Place, layout: Layout, directory: str) -> None:
    with gang(place, layout):
        gpt = build(load_hf_config(UNTIED), layout, UNTIED, {}, seed=0)
        save_huggingface(GptWeights(gpt), Path(directory) / str(place.rank))


@pytest.mark.parametrize(("layout", "message"), [("tp2", "elements are on this rank"), ("pp2", "is not on this rank")])
def test_a_rank_that_holds_a_part_of_the_model_writes_none(layout: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GangFailed, match=message):
        run_gang("tests.workers.test_hf_io:save_a_shard", 2, (LAYOUTS[layout], str(tmp_path)))
    assert not list(tmp_path.glob("[01]"))


def test_a_tensor_is_assembled_from_pieces_that_cover_it() -> None:
    top = Piece("w", Region((2, 2), (0, 0), (1, 2)), torch.tensor([[1.0, 2.0]]))
    bottom = Piece("w", Region((2, 2), (1, 0), (1, 2)), torch.tensor([[3.0, 4.0]]))
    assert assemble([bottom, top]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(CheckpointError, match="2 of its 4 elements"):
        assemble([top, top])
