"""What every rollout engine does, whatever it is made of. Each test runs on the embedded engine and on SGLang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from state.slots import WeightId
from tests.workers.engine_stage import (
    QWEN3,
    Stage,
    embedded_stage,
    manifest_of,
    reference,
    sglang_stage,
    tensors_of,
)
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult, WeightsMismatch, mismatches

EOS = QWEN3["eos_token_id"]
PROMPTS = [(3, 4, 5), (7,), (9, 8, 7, 6, 5, 4), (3, 4, 5), (2, 2)]
ENDLESS = SamplingConfig(max_response_len=4000)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if request.param == "embedded":
        stage = embedded_stage()
    else:
        stage = sglang_stage(tmp_path_factory.mktemp("sglang") / "server.log")
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return reference()


@pytest.fixture(scope="module")
def endless() -> dict[str, torch.Tensor]:
    """Weights that never choose an end token."""
    model = reference(seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_input_embeddings().weight[EOS, 0] = -1.0
        model.model.norm.weight.fill_(10.0)
    return tensors_of(model)


@pytest.fixture
def served(stage: Stage, model: torch.nn.Module) -> WeightId:
    """The reference, published."""
    return stage.publish(tensors_of(model))


def requests(*prompts: Sequence[int], first_seed: int = 100) -> list[GenerateRequest]:
    return [GenerateRequest(str(i), tuple(prompt), first_seed + i) for i, prompt in enumerate(prompts)]


def true_logprobs(model: Any, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *result.response_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def furthest(model: Any, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0) -> float:
    return float((true_logprobs(model, prompt, result, temperature) - torch.tensor(result.logprobs)).abs().max())


# --- which weights


def test_a_new_engine_holds_nothing_that_anyone_published(stage: Stage, model: torch.nn.Module) -> None:
    """The first test of the module: nothing was published yet."""
    view = stage.engine.view()
    assert (view.weights, view.updating, view.torn) == (None, None, None)
    with pytest.raises(EngineRefused, match="nothing was ever published to it"):
        stage.engine.generate(requests((3,)), SamplingConfig(), WeightId(1, 1))
    with pytest.raises(EngineRefused, match="cannot resume"):
        stage.engine.resume()
    held = stage.engine.prove()
    assert held.publish_id is None
    assert {t.name for t in held.tensors} == tensors_of(model).keys()
    assert len(mismatches(manifest_of(tensors_of(model), 1).tensors, held.tensors)) == len(held.tensors)


def test_it_serves_exactly_the_version_that_was_proven(stage: Stage, served: WeightId) -> None:
    (result,) = stage.engine.generate(requests((3,)), SamplingConfig(max_response_len=2), served)
    assert result.versions == (served,)
    assert stage.engine.view().weights == served
    with pytest.raises(EngineRefused, match=f"serves weights {served}, not 1.9999"):
        stage.engine.generate(requests((3,)), SamplingConfig(), WeightId(1, 9999))


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_what_it_holds_does_not_depend_on_the_bucket_size(stage: Stage, bucket_bytes: int) -> None:
    tensors = tensors_of(reference(seed=bucket_bytes % 1000))
    former, stage.bucket_bytes = stage.bucket_bytes, bucket_bytes
    try:
        stage.publish(tensors)
    finally:
        stage.bucket_bytes = former


def test_a_leader_that_opens_another_group_is_joined_again(stage: Stage, model: torch.nn.Module) -> None:
    stage.publish(tensors_of(model))
    stage.sender.close()
    stage.publish(tensors_of(model))


def test_bytes_that_are_not_the_manifests_are_found_and_named(stage: Stage, model: torch.nn.Module) -> None:
    tensors = tensors_of(model)
    wrong = dict(tensors)
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong[name] = tensors[name].clone()
    wrong[name].view(torch.int32)[5, 3] ^= 1
    manifest = stage.begin(tensors)
    stage.transfer(manifest, wrong)
    (difference,) = mismatches(manifest.tensors, stage.engine.prove().tensors)
    assert difference.startswith(f"{name}: digest")
    with pytest.raises(EngineRefused, match=f"does not hold what was published: {name}"):
        stage.engine.commit(manifest)
    stage.engine.abort("a bit was flipped")
    assert (stage.engine.view().weights, stage.engine.view().torn) == (None, "a bit was flipped")
    with pytest.raises(EngineRefused, match="a bit was flipped"):
        stage.engine.generate(requests((3,)), SamplingConfig(), manifest.weights)
    stage.publish(tensors)


def test_nothing_is_committed_before_it_was_proven(stage: Stage, model: torch.nn.Module) -> None:
    manifest = stage.begin(tensors_of(model))
    stage.engine.prove()
    stage.transfer(manifest, tensors_of(model))
    with pytest.raises(EngineRefused, match="has not proven since it arrived"):
        stage.engine.commit(manifest)
    stage.engine.prove()
    stage.engine.commit(manifest)
    stage.engine.resume()


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "untied"])
def test_an_update_of_another_model_is_refused_and_touches_nothing(
    stage: Stage, served: WeightId, model: torch.nn.Module, fault: str
) -> None:
    tensors, norm = tensors_of(model), "model.norm.weight"
    if fault == "missing":
        del tensors[norm]
    tensors |= {
        "unknown": {"model.extra.weight": torch.zeros(2)},
        "shape": {norm: torch.zeros(31)},
        "dtype": {norm: torch.zeros(32, dtype=torch.bfloat16)},
        "untied": {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    }.get(fault, {})
    stage.engine.pause()
    stage.engine.flush()
    with pytest.raises(WeightsMismatch, match=r"model\.norm|model\.extra|lm_head"):
        stage.engine.begin_update(manifest_of(tensors, stage.version + 1))
    stage.engine.resume()
    assert stage.engine.generate(requests((3,)), SamplingConfig(max_response_len=1), served)


def test_it_is_updated_only_while_paused(stage: Stage, served: WeightId, model: torch.nn.Module) -> None:
    with pytest.raises(EngineRefused, match="paused is False"):
        stage.engine.begin_update(manifest_of(tensors_of(model), stage.version + 1))


def test_after_an_update_nothing_comes_from_what_the_former_weights_had_computed(stage: Stage) -> None:
    prompt = tuple(itertools.islice(itertools.cycle(range(2, 16)), 40))
    for seed in (1, 2):
        model = reference(seed=seed)
        weights = stage.publish(tensors_of(model))
        for _ in range(2):
            (result,) = stage.engine.generate(requests(prompt), SamplingConfig(max_response_len=4), weights)
            assert furthest(model, prompt, result) < 1e-4


# --- what it samples


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}, {"top_k": 3}], ids=["all", "top_p", "top_k"])
def test_logprobs_are_the_policys_at_the_temperature_before_any_cut(
    stage: Stage, served: WeightId, model: torch.nn.Module, temperature: float, cut: dict[str, Any]
) -> None:
    sampling = SamplingConfig(temperature=temperature, max_response_len=8, **cut)
    for prompt, result in zip(PROMPTS, stage.engine.generate(requests(*PROMPTS), sampling, served), strict=True):
        assert len(result.logprobs) == len(result.response_ids)
        assert furthest(model, prompt, result, temperature or 1.0) < 1e-4


def test_greedy_takes_the_likeliest_token(stage: Stage, served: WeightId, model: torch.nn.Module) -> None:
    (result,) = stage.engine.generate(requests((3, 4, 5)), SamplingConfig(temperature=0.0, max_response_len=6), served)
    ids = torch.tensor([[3, 4, 5, *result.response_ids]])
    with torch.no_grad():
        assert tuple(model(input_ids=ids).logits[0, 2:-1].argmax(-1).tolist()) == result.response_ids


def test_a_sample_depends_on_its_seed_and_on_nothing_that_it_is_batched_with(stage: Stage, served: WeightId) -> None:
    sampling = SamplingConfig(max_response_len=10)
    together = stage.engine.generate(requests(*PROMPTS), sampling, served)
    assert [r.request_id for r in together] == ["0", "1", "2", "3", "4"]
    for request, batched in zip(requests(*PROMPTS), together, strict=True):
        (alone,) = stage.engine.generate([request], sampling, served)
        assert (alone.response_ids, alone.finish_reason) == (batched.response_ids, batched.finish_reason)
    group = stage.engine.generate(requests(*[(3, 4, 5)] * 16), sampling, served)
    assert len({r.response_ids for r in group}) > 8


def test_the_token_that_ends_a_response_stays_in_it(stage: Stage, served: WeightId) -> None:
    sampling = SamplingConfig(max_response_len=30, stop_token_ids=(7, 8))
    results = stage.engine.generate(requests(*[(3, 4, 5)] * 64), sampling, served)
    ends = {7, 8, EOS}
    assert ends == {r.response_ids[-1] for r in results if r.finish_reason == "stop"}
    for result in results:
        assert not ends & set(result.response_ids[:-1])
        assert result.finish_reason == "stop" or (result.finish_reason, len(result.response_ids)) == ("length", 30)


def test_each_request_may_have_a_limit_of_its_own(stage: Stage, endless: dict[str, torch.Tensor]) -> None:
    weights = stage.publish(endless)
    limits = (1, None, 4, 2)
    asked = [replace(one, max_response_len=n) for one, n in zip(requests(*[(3, 4, 5)] * 4), limits, strict=True)]
    results = stage.engine.generate(asked, SamplingConfig(max_response_len=6), weights)
    assert [(len(r.response_ids), len(r.logprobs)) for r in results] == [(1, 1), (6, 6), (4, 4), (2, 2)]
    assert {r.finish_reason for r in results} == {"length"}
    (alone,) = stage.engine.generate(requests((3, 4, 5)), SamplingConfig(max_response_len=1), weights)
    assert alone == results[0]


def test_a_stop_string_ends_a_response_and_stays_in_it(stage: Stage, served: WeightId) -> None:
    group, stop = requests(*[(3, 4, 5)] * 32), " 7"
    free = stage.engine.generate(group, SamplingConfig(max_response_len=20), served)
    stopped = stage.engine.generate(group, SamplingConfig(max_response_len=20, stop=(stop,)), served)
    shorter = sum(len(a.response_ids) < len(b.response_ids) for a, b in zip(stopped, free, strict=True))
    assert shorter
    for before, after in zip(free, stopped, strict=True):
        assert before.response_ids[: len(after.response_ids)] == after.response_ids


def test_an_empty_prompt_is_refused_and_no_requests_are_no_results(stage: Stage, served: WeightId) -> None:
    with pytest.raises(ValueError, match="request 0 has an empty prompt"):
        stage.engine.generate(requests(()), SamplingConfig(), served)
    assert stage.engine.generate([], SamplingConfig(), served) == ()
    assert stage.engine.view().in_flight == 0


# --- pausing


def test_pausing_ends_what_is_in_flight(stage: Stage, endless: dict[str, torch.Tensor]) -> None:
    weights = stage.publish(endless)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stage.engine.generate, requests(*[(3, 4, 5)] * 4), ENDLESS, weights)
        while stage.engine.view().in_flight != 4:
            assert not running.done()
        with pytest.raises(EngineRefused, match="4 requests are in flight"):
            stage.engine.flush()
        stage.engine.pause()
        results = running.result(timeout=60)
    assert {r.finish_reason for r in results} == {"abort"}
    assert all(len(r.response_ids) == len(r.logprobs) < 4000 for r in results)
    assert stage.engine.view().paused
    with pytest.raises(EngineRefused, match="is paused"):
        stage.engine.generate(requests((3,)), SamplingConfig(), weights)
    stage.engine.flush()
    stage.engine.resume()
    assert stage.engine.generate(requests((3,)), SamplingConfig(max_response_len=2), weights)
