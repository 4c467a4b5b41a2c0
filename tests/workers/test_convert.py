"""`slotwise convert`: Hugging Face to a native release and back, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from orchestrator.cli import main
from state import checkpoints, saves
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


def test_the_command_says_what_it_wrote_and_what_to_do_with_it_and_nothing_else(tmp_path: Path) -> None:
    huggingface(tmp_path / "hf", "qwen3-tied", torch.float32)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "orchestrator", "convert", "hf", "native"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line == "wrote native, a native checkpoint: weights alone. Start from it with --checkpoint.load native"


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"model_type": "gpt2"}, 2, "gpt2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, 2, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 2, "no config that transformers takes"),
        (None, 2, "config.json is not JSON"),
    ],
)
def test_a_directory_that_cannot_be_converted_ends_as_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, object] | None, code: int, said: str
) -> None:
    huggingface(tmp_path / "hf", "qwen3-tied", torch.float32)
    path = tmp_path / "hf" / "config.json"
    path.write_text("xx" if config is None else json.dumps(json.loads(path.read_text()) | config))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "native")]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


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


def test_a_critics_checkpoint_is_no_language_model(tmp_path: Path) -> None:
    saves.begin(tmp_path / "ckpt", 3)
    saves.commit(tmp_path / "ckpt", 3, {"role": "critic"}, None)
    with pytest.raises(ResumeError, match="iter_0000003 is of a critic, which is no language model"):
        convert(tmp_path / "ckpt", tmp_path / "out")
