"""What the ranks of the training tests do: small models, one optimizer step or a few, on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from state.slots import WeightId
from tests.workers.gang_processes import Place
from workers.algorithms.aggregate import StepTotals
from workers.batch import Sample
from workers.config import AlgorithmConfig, ModelConfig, TrainConfig
from workers.megatron.cpu import redirect
from workers.megatron.forward import Scores, score, train_step
from workers.megatron.hf_layout import GptWeights
from workers.megatron.loss import TrainSample
from workers.megatron.model import build, load_hf_config
from workers.megatron.optimizer import TrainOptimizer, build_optimizer
from workers.megatron.parallel import Layout, coordinates, initialise, shutdown
from workers.megatron.step_stats import StepStats

MODEL = ModelConfig(
    dtype="float32",
    config={
        "model_type": "qwen3",
        "vocab_size": 70,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
)
# A large epsilon, so that Adam's first step does not blow rounding errors of tiny gradients up to the learning rate.
TRAIN = TrainConfig(lr=1e-2, adam_eps=1e-3, max_tokens_per_micro_batch=64)
TEMPERATURE = 0.7

# Total lengths, longest first. At most 60 padded tokens make groups of 5 and 3, at most 48 two of 4.
LENGTHS = (12, 12, 11, 10, 10, 9, 8, 5)
BUDGETS = {(8,): 96, (4, 4): 48, (5, 3): 60, (1,) * 8: 1}


def make_samples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        ids = torch.randint(0, 70, (length,), generator=generator).tolist()
        prompt = 3 if length > 3 else length
        mask = [1] * (length - prompt)
        if index % 3 == 1 and len(mask) > 2:
            mask[1] = 0
        samples.append(make_sample(index, ids[:prompt], ids[prompt:], mask))
    return samples


def make_sample(index: int, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int]) -> Sample:
    return Sample(
        group_id=index // 4,
        index=index,
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=(-1.0,) * len(response),
        loss_mask=tuple(mask),
        versions=(WeightId(0, 0),),
        seed=index,
        finish_reason="stop",
        reward=0.0,
    )


def with_targets(samples: Sequence[Sample], seed: int = 1) -> list[TrainSample]:
    """Advantages, and old and reference log-probs a little off what the model says."""
    generator = torch.Generator().manual_seed(seed)
    return [
        TrainSample(
            sample,
            float(torch.randn((), generator=generator)),
            torch.randn(len(sample.response_ids), generator=generator) * 0.1 - 4.2,
            torch.randn(len(sample.response_ids), generator=generator) * 0.1 - 4.2,
        )
        for sample in samples
    ]


def totals_of(samples: Sequence[Sample]) -> StepTotals:
    counts = [sample.num_loss_tokens for sample in samples]
    return StepTotals(sum(counts), sum(count > 0 for count in counts), max_response_len=16)


@dataclass(frozen=True)
class Setting:
    """Where and how a job trains. `shares`: positions of the samples of each data-parallel rank."""

    tp: int = 1
    pp: int = 1
    train: TrainConfig = TRAIN
    model: ModelConfig = MODEL
    total_steps: int = 10


@contextmanager
def gang(place: Place, setting: Setting) -> Iterator[Layout]:
    layout = Layout(place.world_size, setting.tp, setting.pp)
    with redirect("cpu"):
        initialise(place.rank, layout, place.init_method, seed=0, device="cpu", timeout_s=60.0)
        try:
            yield layout
        finally:
            shutdown()


def make_trainee(layout: Layout, setting: Setting, seed: int | None = 5) -> tuple[Any, TrainOptimizer]:
    train = setting.train.model_copy(
        update={
            "num_workers": layout.world_size,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
        }
    )
    model = build(load_hf_config(setting.model), layout, setting.model, train.megatron, seed=seed)
    return build_optimizer(model, train, setting.total_steps)


Shards = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def parameters(model: Any) -> Shards:
    """Name, full shape, offset and values of every piece held here."""
    return [
        (piece.name, piece.region.full_shape, piece.region.offset, piece.tensor.detach().clone())
        for piece in GptWeights(model).pieces()
    ]


def gradients(model: Any) -> Shards:
    """The reduced gradients, read through the map that names parameters. Not for the distributed optimizer."""
    live = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in live:
        parameter.data = parameter.main_grad
    try:
        return parameters(model)
    finally:
        for parameter, data in live.items():
            parameter.data = data


def whole(shards: Sequence[Shards]) -> dict[str, Tensor]:
    """Full tensors from what all ranks hold. Replicas must be equal."""
    tensors: dict[str, Tensor] = {}
    for rank_shards in shards:
        for name, full_shape, offset, values in rank_shards:
            tensor = tensors.setdefault(name, torch.full(full_shape, torch.nan, dtype=values.dtype))
            view = tensor[tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True))]
            assert bool((view.isnan() | torch.isclose(view, values, atol=1e-7)).all()), f"replicas of {name} differ"
            view.copy_(values)
    assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
    return tensors


def farthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@dataclass(frozen=True)
class Step:
    stats: StepStats
    gradients: Shards
    parameters: Shards
    writes: int
    mismatches: list[str]


def one_step(
    model: Any,
    optimizer: TrainOptimizer,
    samples: Sequence[TrainSample],
    totals: StepTotals,
    algorithm: AlgorithmConfig,
    max_tokens: int = 64,
) -> Step:
    seen: list[Shards] = []

    def before_write() -> None:
        seen.append(gradients(model))

    stats = train_step(
        model,
        optimizer,
        samples,
        totals,
        algorithm=algorithm,
        temperature=TEMPERATURE,
        max_tokens=max_tokens,
        before_write=before_write,
    )
    optimizer.finish_gather()
    return Step(stats, seen[0] if seen else [], parameters(model), len(seen), optimizer.master_mismatches())


def step_once_per_case(place: Place, setting: Setting, cases: Sequence[tuple[Any, ...]]) -> list[Step]:
    """One step from the same weights for each case: (samples of each dp rank, all samples, algorithm, budget)."""
    with gang(place, setting) as layout:
        steps = []
        for shares, totals, algorithm, budget in cases:
            model, optimizer = make_trainee(layout, setting)
            steps.append(one_step(model, optimizer, shares[coordinates().dp], totals, algorithm, budget))
        return steps


def score_samples(
    place: Place, setting: Setting, shares: Sequence[Sequence[Sample]], temperature: float, max_tokens: int
) -> Scores | None:
    with gang(place, setting) as layout:
        model, _ = make_trainee(layout, setting)
        return score(model, shares[coordinates().dp], temperature=temperature, max_tokens=max_tokens)


def no_distributed_optimizer(setting: Setting) -> Setting:
    return replace(setting, train=setting.train.model_copy(update={"use_distributed_optimizer": False}))
