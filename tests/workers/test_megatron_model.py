"""Models from Hugging Face configs: what can be built, on which layouts, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from tests.workers.gang_processes import Place, run_gang
from tests.workers.megatron_jobs import LAYOUTS, gang
from tests.workers.tiny_models import tiny
from workers.config import ModelConfig
from workers.megatron.model import UnsupportedModel, build, load_hf_config, padded_vocab_size, transformer_config
from workers.megatron.parallel import Coordinates, Layout

HERE = "tests.workers.test_megatron_model"
JOBS = "tests.workers.megatron_jobs"


def test_a_layout_has_to_multiply_out() -> None:
    assert Layout(8, tp=2, pp=2).dp == 2
    Layout(8, tp=2, pp=2).check()
    with pytest.raises(ValueError, match=r"3 ranks do not divide .* use a multiple of 2"):
        Layout(3, tp=2).check()
    with pytest.raises(ValueError, match="at least 1"):
        Layout(2, tp=0).check()


def where(place: Place, layout: Layout) -> list[Coordinates]:
    """Twice, since a process may leave a gang and join the next."""
    found = []
    for turn in ("a", "b"):
        with gang(Place(place.rank, place.world_size, f"{place.init_method}-{turn}"), layout) as at:
            found.append(at)
        assert not parallel_state.model_parallel_is_initialized()
    return found


def test_ranks_are_numbered_tensor_first_then_data_then_pipeline() -> None:
    by_rank = run_gang(f"{HERE}:where", 4, (LAYOUTS["tp2pp2"],))
    assert [[(at.tp, at.pp, at.dp) for at in turns] for turns in by_rank] == [
        [(0, 0, 0)] * 2,
        [(1, 0, 0)] * 2,
        [(0, 1, 0)] * 2,
        [(1, 1, 0)] * 2,
    ]
    assert [turns[0].is_first_stage for turns in by_rank] == [True, True, False, False]
    assert [turns[0].is_last_stage for turns in by_rank] == [False, False, True, True]


def test_the_vocabulary_is_padded_for_its_layout_and_alike_on_the_usual_ones() -> None:
    assert {padded_vocab_size(151_665, tp) for tp in (1, 2, 4, 8, 16)} == {151_680}
    assert padded_vocab_size(151_665, 3) % 3 == 0
    assert padded_vocab_size(32, 2) == 32


def look(gpt: GPTModel) -> dict[str, Any]:
    padding = gpt.embedding.word_embeddings.weight[gpt.config.vocab_size :]
    return {
        "dtypes": {str(parameter.dtype) for parameter in gpt.parameters()},
        "training": gpt.training,
        "padding": (padding.shape[0], float(padding.abs().sum())),
    }


def test_everything_has_the_models_dtype_and_padding_rows_are_zero() -> None:
    model = tiny("qwen3-tied").model_copy(update={"dtype": "bfloat16"})
    assert run_gang(f"{JOBS}:on_one_rank", 1, (look, model)) == [
        {"dtypes": {"torch.bfloat16"}, "training": True, "padding": (48 - 37, 0.0)}
    ]


def padding_does_not_matter(gpt: GPTModel) -> bool:
    ids = torch.randint(0, 37, (2, 5))
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        short = gpt(ids, torch.arange(5).expand(2, 5), None)
        long = gpt(padded, torch.arange(8).expand(2, 8), None)
    return torch.allclose(short, long[:, :5], atol=1e-6)


def test_padding_on_the_right_changes_nothing_without_a_mask() -> None:
    assert run_gang(f"{JOBS}:on_one_rank", 1, (padding_does_not_matter, tiny("llama-untied"))) == [True]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-tied", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ("qwen3-tied", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3-tied", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}, "sliding attention"),
        ("qwen2-tied", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}, "sliding attention"),
        ("llama-tied", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama-tied", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama-tied", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; known here: default"),
        (
            "llama-tied",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor is 2.0; Megatron's llama3 rope has 1.0",
        ),
        ("qwen3-tied", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_these_models_do_not_do_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model = tiny(name, **changes)
    with pytest.raises(ValueError, match=message):
        build(load_hf_config(model), Layout(1), model, {}, seed=0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(3, pp=3), "num_hidden_layers 2 is not a multiple of pipeline parallel size 3"),
        (Layout(8, tp=8), "num_key_value_heads 4 is not a multiple of tensor parallel size 8"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: Layout, message: str) -> None:
    model = tiny("qwen3-tied")
    with pytest.raises(ValueError, match=message):
        build(load_hf_config(model), layout, model, {}, seed=0)


def test_options_of_megatron_pass_through_unless_the_model_decides_them() -> None:
    hf_config = load_hf_config(tiny("qwen3-tied"))
    config = transformer_config(hf_config, Layout(1), torch.float32, {"attention_softmax_in_fp32": False, "lr": 1.0})
    assert config.attention_softmax_in_fp32 is False
    with pytest.raises(ValueError, match=r"train\.megatron\.num_layers is decided by the model"):
        transformer_config(hf_config, Layout(1), torch.float32, {"num_layers": 3})


def test_a_config_has_to_come_from_somewhere() -> None:
    with pytest.raises(ValueError, match="set hf_checkpoint"):
        load_hf_config(ModelConfig())
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        load_hf_config(ModelConfig(hf_checkpoint="/nowhere"))
    with pytest.raises(UnsupportedModel, match="'gpt2'; known here: qwen3, qwen3_moe, qwen2, llama"):
        load_hf_config(ModelConfig(config={"model_type": "gpt2"}))
