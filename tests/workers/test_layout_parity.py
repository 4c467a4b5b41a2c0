"""One model on every layout: the same digests and the same log-probs, which are transformers' own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from state.digest import digest_tensor
from state.slots import WeightId
from tests.workers.gang_processes import Place, run_gang
from tests.workers.megatron_jobs import LAYOUTS, Held, gang, hold
from tests.workers.test_hf_layout import summed
from tests.workers.tiny_models import TINY, tiny
from workers.batch import Sample
from workers.config import ModelConfig
from workers.megatron.forward import score
from workers.megatron.hf_io import load_huggingface
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout
from workers.rollout.transformers_layout import named_tensors

HERE = "tests.workers.test_layout_parity"
ROPES = {
    "linear rope": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    "llama3 rope": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MODELS = {name: tiny(name) for name in TINY} | {
    name: tiny("llama-untied", rope_parameters=rope) for name, rope in ROPES.items()
}


def sample(index: int, prompt: int, response: int) -> Sample:
    ids = torch.randint(0, 37, (prompt + response,), generator=torch.Generator().manual_seed(index)).tolist()
    return Sample(
        group_id=0,
        index=index,
        prompt_ids=tuple(ids[:prompt]),
        response_ids=tuple(ids[prompt:]),
        logprobs=(0.0,) * response,
        loss_mask=(1,) * response,
        versions=(WeightId(0, 0),),
        seed=index,
        finish_reason="stop",
    )


SAMPLES = (sample(0, 3, 5), sample(1, 7, 2), sample(2, 1, 11), sample(3, 4, 4))
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Found:
    """What one rank says about one model; log-probs on the last stage alone."""

    held: Held
    logprobs: tuple[Tensor, ...] | None


def look(place: Place, layout: Layout, models: dict[str, ModelConfig]) -> dict[str, Found]:
    with gang(place, layout) as at:
        mine = SAMPLES[at.dp :: layout.dp]
        found = {}
        for name, model in models.items():
            gpt = build(load_hf_config(model), layout, model, {}, seed=None)
            load_huggingface(GptWeights(gpt), str(model.hf_checkpoint))
            scored = score(gpt, mine, temperature=TEMPERATURE, max_tokens=24)
            found[name] = Found(hold(at, layout, gpt), None if scored is None else scored.logprobs)
        return found


def theirs(model: PreTrainedModel) -> tuple[Tensor, ...]:
    logprobs = []
    for each in SAMPLES:
        ids = torch.tensor([each.prompt_ids + each.response_ids])
        with torch.no_grad():
            rows = torch.log_softmax(model(ids).logits[0].float() / TEMPERATURE, dim=-1)
        start = len(each.prompt_ids)
        logprobs.append(rows[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1))
    return tuple(logprobs)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Each model as transformers saves it, with weights large enough to matter."""
    root = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        torch.manual_seed(3)
        hf_model = AutoModelForCausalLM.from_config(load_hf_config(model))
        with torch.no_grad():
            for parameter in hf_model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        hf_model.save_pretrained(root / name)
    return {name: ModelConfig(hf_checkpoint=str(root / name), dtype="float32") for name in MODELS}


@dataclass(frozen=True)
class Seen:
    layout: Layout
    ranks: list[dict[str, Found]]


@pytest.fixture(scope="module", params=LAYOUTS)
def seen(request: pytest.FixtureRequest, directories: dict[str, ModelConfig]) -> Seen:
    layout = LAYOUTS[request.param]
    return Seen(layout, run_gang(f"{HERE}:look", layout.world_size, (layout, directories)))


@pytest.fixture(scope="module")
def references(directories: dict[str, ModelConfig]) -> dict[str, PreTrainedModel]:
    return {name: AutoModelForCausalLM.from_pretrained(str(m.hf_checkpoint)).eval() for name, m in directories.items()}


def test_log_probs_are_those_of_transformers_on_every_layout(
    seen: Seen, references: dict[str, PreTrainedModel]
) -> None:
    tp, dp = seen.layout.tp, seen.layout.dp
    for name, reference in references.items():
        expected = theirs(reference)
        last_stage = [logprobs for rank in seen.ranks if (logprobs := rank[name].logprobs) is not None]
        assert len(last_stage) == tp * dp
        for number, ours in enumerate(last_stage):
            for mine, its in zip(ours, expected[number // tp :: dp], strict=True):
                torch.testing.assert_close(mine, its, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_digests_are_those_of_the_tensors_of_transformers_on_every_layout(
    seen: Seen, references: dict[str, PreTrainedModel]
) -> None:
    for name, reference in references.items():
        assert summed([rank[name].held for rank in seen.ranks]) == {
            tensor: digest_tensor(tensor, value) for tensor, value in named_tensors(reference).items()
        }
