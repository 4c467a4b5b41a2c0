"""`slotwise convert`: Hugging Face to a native release and back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from state import checkpoints
from state.digest import digest_tensor
from state.errors import ResumeError
from tests.workers.gang_processes import Place, run_gang
from tests.workers.megatron_jobs import LAYOUTS, Held, gang, hold
from tests.workers.test_hf_layout import summed
from tests.workers.tiny_models import tiny
from workers.config import ModelConfig
from workers.megatron import checkpoint
from workers.megatron.convert import HUGGINGFACE, convert
from workers.megatron.hf_io import SINGLE_FILE
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout

HERE = "tests.workers.test_convert"


def huggingface(directory: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(load_hf_config(tiny(name)), dtype=dtype)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"our": "tokenizer"}')
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3-tied", torch.bfloat16), ("llama-untied", torch.float32), ("qwen3-moe", torch.bfloat16)],
)
def test_there_and_back_is_bit_equal(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = huggingface(tmp_path / "hf", name, dtype)
    release = convert(tmp_path / "hf", tmp_path / "native")

    inventory = checkpoints.inspect(tmp_path / "native")
    assert (release, inventory.tracker, inventory.has_release) == (tmp_path / "native" / "release", "release\n", True)

    assert convert(tmp_path / "native", tmp_path / "back") == tmp_path / "back"
    before, after = load_file(tmp_path / "hf" / SINGLE_FILE), load_file(tmp_path / "back" / SINGLE_FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"our": "tokenizer"}'

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.arange(10).view(1, 10)
    assert reloaded.dtype == dtype
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


def load(place: Place, layout: Layout, native: str, model: ModelConfig) -> Held:
    with gang(place, layout) as at:
        gpt = build(load_hf_config(model), layout, model, {}, seed=None)
        checkpoint.load_weights(Path(native), gpt)
        return hold(at, layout, gpt)


@pytest.mark.parametrize("layout", ["tp2pp2", "dp2"])
def test_a_release_loads_on_other_layouts(layout: str, tmp_path: Path) -> None:
    reference = huggingface(tmp_path / "hf", "qwen3-tied", torch.float32)
    release = convert(tmp_path / "hf", tmp_path / "native")
    sizes, model = LAYOUTS[layout], ModelConfig(hf_checkpoint=str(tmp_path / "hf"), dtype="float32")
    ranks = run_gang(f"{HERE}:load", sizes.world_size, (sizes, str(release), model))
    assert summed(ranks) == {name: digest_tensor(name, value) for name, value in reference.named_parameters()}


def test_one_checkpoint_of_many_can_be_named(tmp_path: Path) -> None:
    huggingface(tmp_path / "hf", "qwen3-tied", torch.float32)
    release = convert(tmp_path / "hf", tmp_path / "native")
    convert(release, tmp_path / "back")
    assert (tmp_path / "back" / SINGLE_FILE).is_file()


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="neither a Hugging Face directory"):
        convert(tmp_path / "nothing", tmp_path / "out")

    huggingface(tmp_path / "hf", "qwen3-tied", torch.float32)
    release = convert(tmp_path / "hf", tmp_path / "native")
    (release / HUGGINGFACE / "config.json").unlink()
    with pytest.raises(ResumeError, match=f"into {release / HUGGINGFACE}"):
        convert(release, tmp_path / "out")

    (tmp_path / "native" / checkpoints.TRACKER).write_text("7")
    with pytest.raises(ResumeError, match="names a complete one; complete iterations in it: none"):
        convert(tmp_path / "native", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_would_lose_bits_is_refused(tmp_path: Path) -> None:
    huggingface(tmp_path / "hf", "qwen3-tied", torch.float16)
    with pytest.raises(ResumeError, match="dtype is float16; only float32 and bfloat16"):
        convert(tmp_path / "hf", tmp_path / "native")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "native")
