import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from state.digest import digest_tensor
from state.digest_records import Region, TensorDigest
from state.slots import Slot, WeightId
from workers.config import ModelConfig, SamplingConfig
from workers.rollout.embedded import EmbeddedEngine
from workers.rollout.noise import gumbel_noise, uniform_noise
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult, WeightsMismatch, mismatches
from workers.rollout.sampling import seed_tensor
from workers.weights.base import Sink
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan, plan_send

VOCAB, EOS = 20, 1
W = WeightId(1, 3)
NOWHERE = Rendezvous((), ())
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


class HandedOver:
    """A receiver of tensors that are here already."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.midway: Callable[[], None] = lambda: None

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if number == 1:
                self.midway()
            sink(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor)
        return 0

    def close(self) -> None:
        pass


def reference(config: dict[str, Any] = QWEN3, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def digests_of(tensors: dict[str, torch.Tensor]) -> tuple[TensorDigest, ...]:
    return tuple(digest_tensor(name, tensors[name]) for name in sorted(tensors))


def manifest_of(tensors: dict[str, torch.Tensor], publish_id: str = "p1", weights: WeightId = W) -> Manifest:
    return Manifest("run", publish_id, Slot.ACTOR, weights, digests_of(tensors))


def plan_of(manifest: Manifest) -> SendPlan:
    return plan_send({t.name: ((0, Region.whole(t.shape)),) for t in manifest.tensors}, manifest.tensors, 1 << 20)


def engine_with(tensors: dict[str, torch.Tensor], config: dict[str, Any] = QWEN3, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        "run/engine/0", ModelConfig(config=config, dtype="float32"), HandedOver(dict(tensors)), **options
    )


def received(engine: EmbeddedEngine) -> HandedOver:
    receiver = engine._receiver
    assert isinstance(receiver, HandedOver)
    return receiver


def publish(engine: EmbeddedEngine, manifest: Manifest) -> None:
    engine.pause()
    engine.flush()
    engine.begin_update(manifest)
    engine.receive(plan_of(manifest), NOWHERE)
    assert mismatches(manifest.tensors, engine.prove().tensors) == ()
    engine.commit(manifest)
    engine.resume()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return reference()


@pytest.fixture
def engine(model: torch.nn.Module) -> EmbeddedEngine:
    tensors = tensors_of(model)
    engine = engine_with(tensors)
    publish(engine, manifest_of(tensors))
    return engine


def requests(*prompts: Sequence[int], first_seed: int = 100) -> list[GenerateRequest]:
    return [GenerateRequest(str(i), tuple(prompt), first_seed + i) for i, prompt in enumerate(prompts)]


def true_logprobs(model: torch.nn.Module, prompt: Sequence[int], result: GenerateResult, temperature: float) -> Any:
    ids = torch.tensor([[*prompt, *result.response_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


PROMPTS = [(3, 4, 5), (7,), (9, 8, 7, 6, 5, 4), (3, 4, 5), (2, 2)]


# --- what it samples


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}, {"top_k": 3}], ids=["all", "top_p", "top_k"])
def test_logprobs_are_the_policys_at_the_temperature_before_any_cut(engine, model, temperature, cut):
    sampling = SamplingConfig(temperature=temperature, max_response_len=8, **cut)
    for prompt, result in zip(PROMPTS, engine.generate(requests(*PROMPTS), sampling, W), strict=True):
        expected = true_logprobs(model, prompt, result, temperature)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token_and_ignores_seeds(engine, model):
    sampling = SamplingConfig(temperature=0.0, max_response_len=6)
    (one,), (other,) = (engine.generate(requests((3, 4, 5), first_seed=s), sampling, W) for s in (1, 2))
    assert one.response_ids == other.response_ids
    ids = torch.tensor([[3, 4, 5, *one.response_ids]])
    with torch.no_grad():
        assert tuple(model(input_ids=ids).logits[0, 2:-1].argmax(-1).tolist()) == one.response_ids
    torch.testing.assert_close(torch.tensor(one.logprobs), true_logprobs(model, (3, 4, 5), one, 1.0), atol=1e-5, rtol=0)


def test_a_sample_does_not_depend_on_what_it_is_batched_with(engine):
    sampling = SamplingConfig(max_response_len=10)
    together = engine.generate(requests(*PROMPTS), sampling, W)
    for request, batched in zip(requests(*PROMPTS), together, strict=True):
        (alone,) = engine.generate([request], sampling, W)
        assert alone.response_ids == batched.response_ids
        assert alone.finish_reason == batched.finish_reason
        torch.testing.assert_close(torch.tensor(alone.logprobs), torch.tensor(batched.logprobs), atol=1e-5, rtol=0)


def test_results_come_in_the_order_of_requests_for_any_batch_size(model):
    tensors = tensors_of(model)
    small, big = engine_with(tensors, max_batch_size=2), engine_with(tensors)
    sampling = SamplingConfig(max_response_len=5)
    for engine in (small, big):
        publish(engine, manifest_of(tensors))
    one, other = (e.generate(requests(*PROMPTS), sampling, W) for e in (small, big))
    assert [r.request_id for r in one] == ["0", "1", "2", "3", "4"]
    assert [r.response_ids for r in one] == [r.response_ids for r in other]


def test_seeds_alone_make_samples_of_a_group_differ(engine):
    sampling = SamplingConfig(max_response_len=12)
    group = requests(*[(3, 4, 5)] * 16)
    first, again = engine.generate(group, sampling, W), engine.generate(group, sampling, W)
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert len({r.response_ids for r in first}) > 8


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"top_k": 4}], ids=["all", "top_p", "top_k"])
def test_samples_have_the_distribution_that_was_asked_for(engine, model, temperature, cut):
    count, prompt = 4000, (3, 4, 5)
    sampling = SamplingConfig(temperature=temperature, max_response_len=1, **cut)
    drawn = Counter(r.response_ids[0] for r in engine.generate(requests(*[prompt] * count), sampling, W))
    with torch.no_grad():
        probs = (model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    keep = VOCAB
    if "top_k" in cut:
        keep = cut["top_k"]
    if "top_p" in cut:
        keep = int((probs[order].cumsum(0) < cut["top_p"]).sum()) + 1
    kept = order[:keep]
    assert set(drawn) <= set(kept.tolist())
    expected = probs[kept] / probs[kept].sum() * count
    common = expected >= 5
    seen = torch.tensor([drawn[int(token)] for token in kept], dtype=torch.float64)
    cells = (seen - expected)[common] ** 2 / expected[common]
    assert cells.sum() < _chi_square_limit(len(cells) - 1)


def _chi_square_limit(freedom: int) -> float:
    """99.99 % quantile by Wilson and Hilferty."""
    k = max(freedom, 1)
    return k * (1 - 2 / (9 * k) + 3.719 * math.sqrt(2 / (9 * k))) ** 3


def test_noise_is_a_pure_function_of_seed_position_and_token():
    seeds = seed_tensor([5, -1, 2**64 - 1, 2**80 + 5], torch.device("cpu"))
    noise = uniform_noise(seeds, 3, 50)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(noise[1], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(noise[:, :7], uniform_noise(seeds, 3, 7))
    assert not torch.equal(noise, uniform_noise(seeds, 4, 50))
    assert gumbel_noise(seeds, 0, 50).isfinite().all()


def test_noise_is_uniform_over_neighbouring_seeds_positions_and_tokens():
    flat = torch.cat([uniform_noise(torch.arange(200), position, 50).reshape(-1) for position in range(4)])
    counts = torch.histc(flat, bins=100, min=0, max=1)
    expected = len(flat) / 100
    assert ((counts - expected) ** 2 / expected).sum() < _chi_square_limit(99)
    grid = uniform_noise(torch.arange(20000), 0, 2)
    for a, b in ((grid[:, 0], grid[:, 1]), (grid[:-1, 0], grid[1:, 0])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.03


def test_every_position_of_a_response_is_drawn_anew(model):
    """All tokens are equally likely to a model of zeros, so that only the noise tells positions apart."""
    zeros = {name: torch.zeros_like(t) for name, t in tensors_of(model).items()}
    engine = engine_with(zeros)
    publish(engine, manifest_of(zeros))
    results = engine.generate(requests(*[(3,)] * 400), SamplingConfig(max_response_len=2), W)
    pairs = [r.response_ids for r in results if len(r.response_ids) == 2]
    same = sum(a == b for a, b in pairs) / len(pairs)
    assert same < 0.15


def test_llama_works_too():
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
    }
    llama = reference(config)
    engine = engine_with(tensors_of(llama), config)
    publish(engine, manifest_of(tensors_of(llama)))
    for prompt, result in zip(PROMPTS, engine.generate(requests(*PROMPTS), SamplingConfig(), W), strict=True):
        torch.testing.assert_close(
            torch.tensor(result.logprobs), true_logprobs(llama, prompt, result, 1.0), atol=1e-5, rtol=0
        )


# --- how a sample ends


def test_the_token_that_ends_a_response_stays_in_it(engine):
    results = engine.generate(requests(*[(3, 4, 5)] * 64), SamplingConfig(max_response_len=30), W)
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert stopped
    for result in results:
        assert len(result.response_ids) == len(result.logprobs)
        assert result.versions == (W,)
        assert EOS not in result.response_ids[:-1]
        assert (result.response_ids[-1] == EOS) == (result.finish_reason == "stop")
        assert result.finish_reason == "stop" or len(result.response_ids) == 30


def test_stop_token_ids_are_added_to_the_models_own(engine):
    sampling = SamplingConfig(max_response_len=30, stop_token_ids=(7, 8))
    results = engine.generate(requests(*[(3, 4, 5)] * 64), sampling, W)
    assert {7, 8, EOS} == {r.response_ids[-1] for r in results if r.finish_reason == "stop"}
    assert not any({7, 8, EOS} & set(r.response_ids[:-1]) for r in results)


def test_a_token_budget_of_one_is_one_token(engine):
    results = engine.generate(requests(*PROMPTS), SamplingConfig(max_response_len=1), W)
    assert [len(r.response_ids) for r in results] == [1] * 5


def test_stop_strings_end_a_response_and_stay_in_it(model, tmp_path):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {chr(ord("a") + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    engine = engine_with(tensors_of(model), tokenizer=str(tmp_path))
    publish(engine, manifest_of(tensors_of(model)))
    group = requests(*[(3, 4, 5)] * 64)
    free = engine.generate(group, SamplingConfig(max_response_len=30), W)
    pairs = Counter(pair for r in free for pair in zip(r.response_ids[1:], r.response_ids[2:], strict=False))
    (a, b), _ = pairs.most_common(1)[0]
    stopped = engine.generate(group, SamplingConfig(max_response_len=30, stop=(f"{chr(97 + a)}{chr(97 + b)}",)), W)
    shorter = 0
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 2 for i in range(len(before.response_ids) - 1) if before.response_ids[i : i + 2] == (a, b)]
        assert after.response_ids == before.response_ids[: ends[0] if ends else None]
        assert after.finish_reason == ("stop" if ends else before.finish_reason)
        shorter += bool(ends) and ends[0] < len(before.response_ids)
    assert shorter


def test_stop_strings_without_a_tokenizer_are_refused(engine):
    with pytest.raises(ValueError, match=r"has no tokenizer, which stop strings need: set model\.tokenizer"):
        engine.generate(requests((3,)), SamplingConfig(stop=("x",)), W)


def test_an_empty_prompt_is_refused_and_leaves_nothing_in_flight(engine):
    with pytest.raises(ValueError, match="request 0 has an empty prompt"):
        engine.generate(requests(()), SamplingConfig(), W)
    assert engine.view().in_flight == 0


def test_no_requests_are_no_results(engine):
    assert engine.generate([], SamplingConfig(), W) == ()


# --- pausing


class Interrupted:
    """Runs a long generation in a thread and stops it after a few tokens, without waiting for time to pass."""

    def __init__(self, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, after_tokens: int = 3) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        count = 0
        forward = type(engine._model).forward

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == after_tokens:
                self.reached.set()
                assert self.go_on.wait(20)
            return forward(*args, **kwargs)

        monkeypatch.setattr(type(engine._model), "forward", slow)


def test_pausing_ends_what_is_in_flight_within_a_token(engine, monkeypatch):
    held = Interrupted(engine, monkeypatch)
    endless = SamplingConfig(max_response_len=500)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests(*PROMPTS), endless, W)
        assert held.reached.wait(20)
        assert engine.view().in_flight == 5
        with pytest.raises(EngineRefused, match="cannot flush: 5 requests are in flight"):
            engine.flush()
        engine.pause()
        with pytest.raises(EngineRefused, match=r"cannot be updated: paused is True, 5 requests"):
            engine.begin_update(manifest_of(tensors_of(reference())))
        assert engine.prove().publish_id is None
        held.go_on.set()
        results = running.result(20)
    aborted = [r for r in results if r.finish_reason == "abort"]
    assert aborted
    assert {len(r.response_ids) for r in aborted} == {3}
    assert all(len(r.logprobs) == len(r.response_ids) for r in results)
    engine.flush()
    with pytest.raises(EngineRefused, match="is paused"):
        engine.generate(requests((3,)), endless, W)
    engine.resume()
    assert engine.generate(requests((3,)), SamplingConfig(max_response_len=2), W)


def test_requests_that_never_started_come_back_empty(model, monkeypatch):
    engine = engine_with(tensors_of(model), max_batch_size=2)
    publish(engine, manifest_of(tensors_of(model)))
    held = Interrupted(engine, monkeypatch, after_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests(*PROMPTS), SamplingConfig(max_response_len=500), W)
        assert held.reached.wait(20)
        engine.pause()
        held.go_on.set()
        results = running.result(20)
    assert sorted(len(r.response_ids) for r in results) == [0, 0, 0, 1, 1]


# --- weights


def test_it_starts_with_no_weights_and_generates_nothing(model):
    engine = engine_with(tensors_of(model))
    assert engine.view().weights is None
    held = {t.name: t.value for t in engine.prove().tensors}
    for digest in digests_of(tensors_of(model)):
        assert held[digest.name] != digest.value
    for weights in (W, WeightId(0, 0)):
        with pytest.raises(EngineRefused, match="nothing was ever published to it"):
            engine.generate(requests((3,)), SamplingConfig(), weights)
    with pytest.raises(EngineRefused, match="cannot resume: nothing was ever published"):
        engine.resume()


def test_it_generates_with_exactly_the_expected_weights_only(engine):
    for other in (WeightId(1, 2), WeightId(1, 4), WeightId(2, 3)):
        with pytest.raises(EngineRefused, match=rf"serves weights 1\.3, not {other}"):
            engine.generate(requests((3,)), SamplingConfig(), other)


def test_a_publish_replaces_the_weights_that_sample(engine):
    after = tensors_of(reference(seed=9))
    received(engine).tensors = after
    publish(engine, manifest_of(after, "p2", WeightId(1, 4)))
    (result,) = engine.generate(requests((3, 4, 5)), SamplingConfig(), WeightId(1, 4))
    assert result.versions == (WeightId(1, 4),)
    expected = true_logprobs(reference(seed=9), (3, 4, 5), result, 1.0)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=0)


def test_nothing_is_generated_between_begin_and_commit(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    engine.pause()
    engine.begin_update(manifest)
    assert engine.view().weights is None
    assert engine.view().updating == "p2"
    with pytest.raises(EngineRefused, match="publish p2 is under way"):
        engine.generate(requests((3,)), SamplingConfig(), W)
    with pytest.raises(EngineRefused, match="cannot resume: publish p2 is under way"):
        engine.resume()


def test_an_aborted_update_leaves_it_torn_until_the_next_publish(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    engine.pause()
    engine.begin_update(manifest)
    engine.abort("the sender died")
    view = engine.view()
    assert (view.weights, view.updating, view.torn, view.paused) == (None, None, "the sender died", True)
    with pytest.raises(EngineRefused, match=r"came to nothing \(the sender died\)"):
        engine.generate(requests((3,)), SamplingConfig(), W)
    with pytest.raises(EngineRefused, match="cannot resume"):
        engine.resume()
    with pytest.raises(EngineRefused, match="cannot commit"):
        engine.commit(manifest)
    publish(engine, manifest)
    assert engine.view().torn is None
    assert engine.generate(requests((3,)), SamplingConfig(), W)


def test_an_update_needs_a_paused_engine_and_the_actors_weights(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    with pytest.raises(EngineRefused, match="paused is False"):
        engine.begin_update(manifest)
    engine.pause()
    with pytest.raises(EngineRefused, match="takes the actor's weights, not those of ref"):
        engine.begin_update(dataclasses.replace(manifest, slot=Slot.REF))
    with pytest.raises(EngineRefused, match="no update has begun"):
        engine.receive(plan_of(manifest), NOWHERE)
    engine.resume()
    assert engine.generate(requests((3,)), SamplingConfig(), W)


def test_names_shapes_and_dtypes_must_be_the_models_own(engine, model):
    engine.pause()
    tensors = tensors_of(model)
    norm = "model.norm.weight"
    wrong = {
        r"model\.norm\.weight is missing": {k: v for k, v in tensors.items() if k != norm},
        r"lm_head\.weight is not in this model": {**tensors, "lm_head.weight": torch.zeros(VOCAB, 32)},
        r"model\.norm\.weight is float32 \[31\], here float32 \[32\]": {**tensors, norm: torch.zeros(31)},
        r"model\.norm\.weight is bfloat16 \[32\]": {**tensors, norm: torch.zeros(32, dtype=torch.bfloat16)},
    }
    for words, others in wrong.items():
        with pytest.raises(WeightsMismatch, match=words):
            engine.begin_update(manifest_of(others, "p2"))
    engine.resume()
    assert engine.generate(requests((3,)), SamplingConfig(), W)


def test_an_untied_model_wants_its_own_head():
    config = {**QWEN3, "tie_word_embeddings": False}
    untied = tensors_of(reference(config))
    assert "lm_head.weight" in untied
    engine = engine_with(untied, config)
    publish(engine, manifest_of(untied))
    engine.pause()
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight is missing"):
        engine.begin_update(manifest_of({k: v for k, v in untied.items() if k != "lm_head.weight"}, "p2"))


@pytest.mark.parametrize("fault", ["flipped", "missing", "unproven", "proven too early"])
def test_nothing_is_committed_that_was_not_received_whole_and_proven(model, fault):
    tensors = tensors_of(model)
    manifest = manifest_of(tensors)
    engine = engine_with(tensors)
    receiver = received(engine)
    if fault == "flipped":
        flipped = tensors["model.norm.weight"].clone()
        flipped.view(torch.int32)[5] ^= 1
        receiver.tensors = {**tensors, "model.norm.weight": flipped}
    if fault == "missing":
        receiver.tensors = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    engine.pause()
    engine.begin_update(manifest)
    if fault == "proven too early":
        engine.prove()
    engine.receive(plan_of(manifest), NOWHERE)
    if fault in ("flipped", "missing"):
        (wrong,) = mismatches(manifest.tensors, engine.prove().tensors)
        assert wrong.startswith("model.norm.weight: digest")
    with pytest.raises(EngineRefused, match=r"model.norm.weight: digest|never arrived|has not proven"):
        engine.commit(manifest)
    assert engine.view().weights is None
    with pytest.raises(EngineRefused):
        engine.generate(requests((3,)), SamplingConfig(), W)


def test_a_tensor_that_stayed_away_is_missed_even_where_its_former_bytes_were_right(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    del received(engine).tensors["model.norm.weight"]
    engine.pause()
    engine.begin_update(manifest)
    engine.receive(plan_of(manifest), NOWHERE)
    assert mismatches(manifest.tensors, engine.prove().tensors) == ()
    with pytest.raises(EngineRefused, match=r"\['model\.norm\.weight'\] never arrived"):
        engine.commit(manifest)


def test_a_proof_ends_with_the_next_transfer(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    engine.pause()
    engine.begin_update(manifest)
    engine.receive(plan_of(manifest), NOWHERE)
    engine.prove()
    received(engine).tensors["model.norm.weight"] = torch.zeros(32)
    engine.receive(plan_of(manifest), NOWHERE)
    with pytest.raises(EngineRefused, match="has not proven since it arrived"):
        engine.commit(manifest)


def test_a_tensor_that_arrives_twice_is_an_error(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    sent = received(engine).tensors

    class Twice(HandedOver):
        def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
            super().receive(plan, rendezvous, sink)
            return super().receive(plan, rendezvous, sink)

    engine._receiver = Twice(sent)
    engine.pause()
    engine.begin_update(manifest)
    with pytest.raises(WeightsMismatch, match=r"model\.embed_tokens\.weight arrived twice"):
        engine.receive(plan_of(manifest), NOWHERE)


def test_no_update_begins_while_another_still_arrives(engine, model):
    manifest, later = manifest_of(tensors_of(model), "p2"), manifest_of(tensors_of(model), "p3")
    refused: list[str] = []

    def overtake() -> None:
        engine.abort("the sender died")
        with pytest.raises(EngineRefused) as error:
            engine.begin_update(later)
        refused.append(str(error.value))

    received(engine).midway = overtake
    engine.pause()
    engine.begin_update(manifest)
    engine.receive(plan_of(manifest), NOWHERE)
    assert "a transfer is under way" in refused[0]
    assert engine.view().weights is None
    received(engine).midway = lambda: None
    publish(engine, later)


def test_a_commit_must_be_of_the_manifest_that_began(engine, model):
    manifest = manifest_of(tensors_of(model), "p2")
    engine.pause()
    engine.begin_update(manifest)
    engine.receive(plan_of(manifest), NOWHERE)
    engine.prove()
    for other in (
        dataclasses.replace(manifest, publish_id="p3"),
        dataclasses.replace(manifest, weights=WeightId(1, 9)),
    ):
        with pytest.raises(EngineRefused, match="cannot commit publish"):
            engine.commit(other)
    engine.commit(manifest)
    assert engine.view().weights == W


def test_what_is_still_arriving_cannot_be_proven(model):
    tensors = tensors_of(model)
    engine = engine_with(tensors)
    receiver = received(engine)
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(EngineRefused) as error:
            engine.prove()
        refused.append(str(error.value))

    receiver.midway = ask
    publish(engine, manifest_of(tensors))
    assert refused == ["run/engine/0 cannot prove what is still arriving"]


def test_an_engine_that_still_receives_is_not_flushed_and_so_not_updated(model):
    tensors = tensors_of(model)
    engine = engine_with(tensors)
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(EngineRefused) as error:
            engine.flush()
        refused.append(str(error.value))

    received(engine).midway = ask
    publish(engine, manifest_of(tensors))
    assert refused == ["run/engine/0 cannot flush: a transfer is under way"]
    engine.pause()
    engine.flush()


def test_mismatches_name_every_difference():
    a, b = torch.zeros(3), torch.ones(3)
    published = (digest_tensor("a", a), digest_tensor("b", b), digest_tensor("c", b))
    held = (digest_tensor("b", a), digest_tensor("c", b.double()), digest_tensor("d", b))
    words = mismatches(published, held)
    assert [w.split(":")[0] for w in words] == ["a", "b", "c", "d"]
    assert "missing in the engine" in words[0]
    assert "digest 0000000000000000 in the engine" in words[1]
    assert "float64 [3] in the engine, float32 [3] published" in words[2]
    assert "in the engine only" in words[3]
    assert mismatches(published, published) == ()


def test_end_tokens_of_a_directory_come_from_its_generation_config(tmp_path):
    from transformers import GenerationConfig

    config = AutoConfig.for_model("qwen3", **{k: v for k, v in QWEN3.items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[4, 6], pad_token_id=0).save_pretrained(tmp_path)
    model = reference()
    engine = EmbeddedEngine(
        "run/engine/0", ModelConfig(hf_checkpoint=str(tmp_path), dtype="float32"), HandedOver(tensors_of(model))
    )
    publish(engine, manifest_of(tensors_of(model)))
    results = engine.generate(requests(*[(3, 4, 5)] * 64), SamplingConfig(max_response_len=30), W)
    assert {r.response_ids[-1] for r in results if r.finish_reason == "stop"} == {4, 6}
