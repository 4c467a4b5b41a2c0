"""What is SGLang's alone: its server's life, its words, and the caches that it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from state.slots import WeightId
from tests.e2e.runs import until
from tests.workers.engine_stage import (
    ENGINE,
    LOOPBACK,
    QWEN3,
    TIMEOUT_S,
    Stage,
    digests_of,
    needs_who_wrote,
    reference,
    sglang_stage,
    tensors_of,
)
from tests.workers.test_engine_contract import furthest, requests, true_logprobs
from workers.config import SamplingConfig
from workers.rollout import sglang_ipc
from workers.rollout.protocol import EngineDied, EngineRefused, mismatches
from workers.rollout.sglang_disk import SglangFromDisk
from workers.rollout.sglang_ipc import SglangFromMemory
from workers.weights.base import Sender
from workers.weights.buckets import TensorSpec
from workers.weights.disk import DiskSender
from workers.weights.errors import TransportError
from workers.weights.ipc import IpcSender

pytestmark = pytest.mark.sglang
PROMPT = tuple(itertools.islice(itertools.cycle(range(2, 16)), 60))
FEW = SamplingConfig(max_response_len=4)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = sglang_stage(tmp_path_factory.mktemp("sglang") / "server.log")
    yield stage
    stage.close()


def off_after_an_update(stage: Stage, flush: Callable[[], None]) -> float:
    """How far log-probs of a prompt that was seen before are from those of the weights that were just proven."""
    former, model = reference(seed=1), reference(seed=2)
    weights = stage.publish(tensors_of(former))
    stage.engine.generate(requests(PROMPT), FEW, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.engine, "_flush", flush)
        weights = stage.publish(tensors_of(model))
    (result,) = stage.engine.generate(requests(PROMPT), FEW, weights)
    return furthest(model, PROMPT, result)


def test_proven_weights_with_a_cache_of_the_former_ones_generate_wrongly_and_a_publish_flushes_it(stage: Stage) -> None:
    """Every update succeeds and every proof holds: without the flush responses still come of the former weights."""
    assert off_after_an_update(stage, stage.engine._flush) < 1e-4
    assert off_after_an_update(stage, lambda: None) > 0.5
    assert off_after_an_update(stage, stage.engine._flush) < 1e-4


def test_an_update_that_the_server_rejects_ends_with_its_words_and_the_next_one_works(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes arrive, but the server is told of another shape than its model has."""
    tensors, transfer = tensors_of(reference()), stage.engine._transfer
    manifest = stage.begin(tensors)
    with monkeypatch.context() as patch:
        load = transfer._load
        patch.setattr(stage, "bucket_bytes", 1 << 30)
        patch.setattr(transfer, "_load", lambda specs, group: load([misshaped(s) for s in specs], group))
        with pytest.raises(TransportError, match=r"run/engine/0: /update_weights_from_distributed: .*Failed to update"):
            stage.transfer(manifest, tensors)
    stage.engine.abort("rejected")
    assert stage.engine.view().weights is None
    stage.sender.close()
    stage.publish(tensors)


def misshaped(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(4, 8)) if spec.name == "model.norm.weight" else spec


def publish_over(stage: Stage, sender: Sender, transfer: object) -> None:
    model = reference(seed=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "sender", sender)
        patch.setattr(stage.engine, "_transfer", transfer)
        weights = stage.publish(tensors_of(model))
        (result,) = stage.engine.generate(requests(PROMPT), FEW, weights)
    assert furthest(model, PROMPT, result) < 1e-4
    stage.publish(tensors_of(reference()))


def test_weights_that_travel_over_files_are_proven_too(stage: Stage, tmp_path: Path) -> None:
    sender = DiskSender(0, host=LOOPBACK, directory=str(tmp_path), timeout_s=TIMEOUT_S)
    client = stage.engine._server.client
    publish_over(stage, sender, SglangFromDisk(ENGINE, client, tp_size=1, timeout_s=TIMEOUT_S))
    assert list(tmp_path.iterdir()) == []


def test_weights_in_shared_memory_are_proven_too_and_a_rejected_bucket_does_not_hold_up_the_leader(
    stage: Stage,
) -> None:
    sender = IpcSender(0, host=LOOPBACK, device="cpu", timeout_s=TIMEOUT_S)
    reader = SglangFromMemory(ENGINE, stage.engine._server.client, timeout_s=TIMEOUT_S)
    publish_over(stage, sender, reader)
    tensors = tensors_of(reference())
    manifest = stage.begin(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "sender", sender)
        patch.setattr(stage.engine, "_transfer", reader)
        patch.setattr(sglang_ipc, "load_action", lambda buffer, tensors: "slotwise.load {}")
        with pytest.raises(TransportError, match="run/engine/0: /weights_checker: 'buffer'"):
            stage.transfer(manifest, tensors)
    stage.publish(tensors)


def test_the_server_says_which_version_it_serves(stage: Stage) -> None:
    weights = stage.publish(tensors_of(reference()))
    assert stage.engine._server.client.get("/model_info", limit_s=5)["weight_version"] == str(weights)


def test_a_request_that_reaches_the_paused_server_is_ended_before_the_update(stage: Stage) -> None:
    """It was admitted before the pause and travelled for a while: the next weights must never answer it."""
    weights = stage.publish(tensors_of(reference()))
    client = stage.engine._server.client
    client.post("/pause_generation", {"mode": "abort"}, limit_s=10)
    endless = SamplingConfig(max_response_len=2000)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(stage.engine.generate, requests(*[(3, 4, 5)] * 2), endless, weights)
        while stage.engine.view().in_flight != 2:
            assert not late.done()
        stage.engine.pause()
        with pytest.raises(EngineRefused, match="2 requests are in flight"):
            stage.engine.flush()
        results = late.result(timeout=30)
    assert all(r.finish_reason in ("abort", "stop") for r in results)
    stage.publish(tensors_of(reference(seed=3)))


@pytest.mark.parametrize("config", ["dense", "experts"])
def test_every_tensor_arrives_in_the_dtype_that_it_left_in(tmp_path: Path, config: str) -> None:
    """None of the architectures that have a map keeps parameters in float32 when the model is in bfloat16."""
    described = QWEN3 if config == "dense" else MOE
    stage = sglang_stage(tmp_path / "server.log", described, dtype="bfloat16")
    try:
        tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(reference(described)).items()}
        stage.publish(tensors)
        held = {t.name: (t.dtype, t.shape, t.value) for t in stage.engine.prove().tensors}
        assert held == {t.name: (t.dtype, t.shape, t.value) for t in digests_of(tensors)}
        assert {dtype for dtype, _, _ in held.values()} == {"bfloat16"}
    finally:
        stage.close()


def test_a_response_waits_for_the_next_weights_and_says_which_wrote_which_tokens(tmp_path: Path) -> None:
    """Its tokens are those of the old weights up to where they changed, and from there those of the new ones, computed
    with nothing that the old ones had left in a cache."""
    needs_who_wrote()
    stage = sglang_stage(tmp_path / "server.log", UNTIED, pause_mode="retract")
    try:
        old, new = endless_model(seed=1), endless_model(seed=2)
        former = stage.publish(tensors_of(old))
        sampling = SamplingConfig(max_response_len=1200)
        group = requests(*[PROMPT] * 8)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stage.engine.generate, group, sampling, former)
            wait_for_tokens(stage)
            latter = stage.publish(tensors_of(new))
            results = running.result(timeout=120)
        waited = [result for result in results if result.handovers]
        assert waited
        for result in waited:
            assert result.versions == (former, latter)
            assert result.finish_reason in ("length", "stop")
            (change,) = result.handovers
            off_old = (true_logprobs(old, PROMPT, result) - torch.tensor(result.logprobs)).abs()
            off_new = (true_logprobs(new, PROMPT, result) - torch.tensor(result.logprobs)).abs()
            assert off_old[:change].max() < 1e-3
            assert off_new[change:].max() < 1e-3
            assert min(off_old[change:].max(), off_new[:change].max()) > 0.5
    finally:
        stage.close()


def test_an_update_that_comes_to_nothing_ends_what_waits_for_it(tmp_path: Path) -> None:
    needs_who_wrote()
    stage = sglang_stage(tmp_path / "server.log", UNTIED, pause_mode="retract")
    try:
        tensors = tensors_of(endless_model(seed=1))
        weights = stage.publish(tensors)
        with ThreadPoolExecutor(1) as pool:
            endless = SamplingConfig(max_response_len=6000)
            running = pool.submit(stage.engine.generate, requests(PROMPT), endless, weights)
            wait_for_tokens(stage)
            stage.begin(tensors)
            stage.engine.abort("torn")
            (result,) = running.result(timeout=60)
        assert (result.finish_reason, result.versions) == ("abort", (weights,))
        stage.publish(tensors)
    finally:
        stage.close()


def endless_model(seed: int) -> PreTrainedModel:
    """Hardly ever chooses an end token."""
    model = reference(UNTIED, seed=seed)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[UNTIED["eos_token_id"]] = 0.0
        head[2:] *= 3.0
    return model


def wait_for_tokens(stage: Stage) -> None:
    """Until the server generates."""

    def running() -> bool:
        (state,) = stage.engine._server.client.get("/server_info", limit_s=10)["internal_states"]
        return bool(state["last_gen_throughput"])

    until(running, "the server generates")


def family(stage: Stage) -> list[psutil.Process]:
    keeper = psutil.Process(stage.engine.view().pid)
    return [keeper, *keeper.children(recursive=True)]


@pytest.mark.parametrize("victim", ["scheduler", "server", "keeper"])
def test_a_server_that_dies_in_any_part_is_dead_and_gone(tmp_path: Path, victim: str) -> None:
    stage = sglang_stage(tmp_path / "server.log")
    weights = stage.publish(tensors_of(reference()))
    processes = family(stage)
    keeper, server, *others = processes
    chosen = {"keeper": keeper, "server": server, "scheduler": next(p for p in others if "scheduler" in title(p))}
    chosen[victim].kill()
    with pytest.raises(EngineDied, match="the server of run/engine/0 ended with code"):
        answer_for_ever(stage, weights)
    with pytest.raises(EngineDied):
        stage.engine.view()
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    scratch = stage.engine._server._scratch.path
    stage.close()
    assert not scratch.exists()


def answer_for_ever(stage: Stage, weights: WeightId) -> None:
    while True:
        stage.engine.generate(requests((3,)), FEW, weights)


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()) + process.name()


UNTIED = {**QWEN3, "tie_word_embeddings": False}
LLAMA = {**QWEN3, "model_type": "llama", "tie_word_embeddings": False, "vocab_size": 37}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MOE = {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "last"),
    [(LLAMA, "model.layers.0.mlp.down_proj.weight"), (MOE, "model.layers.0.mlp.experts.3.down_proj.weight")],
    ids=["an output layer of its own", "experts"],
)
def test_a_model_split_over_two_processes_is_proven(config: dict[str, Any], last: str, tmp_path: Path) -> None:
    model = reference(config)
    stage = sglang_stage(tmp_path / "server.log", config, tp_size=2)
    try:
        weights = stage.publish(tensors_of(model))
        for result in stage.engine.generate(requests(*[(3, 4, 5)] * 4), SamplingConfig(max_response_len=6), weights):
            assert furthest(model, (3, 4, 5), result) < 1e-4
        wrong = {n: t.clone() for n, t in tensors_of(model).items()}
        wrong[last].view(torch.int32)[-1, -1] ^= 1
        manifest = stage.begin(tensors_of(model))
        stage.transfer(manifest, wrong)
        (difference,) = mismatches(manifest.tensors, stage.engine.prove().tensors)
        assert difference.startswith(f"{last}: digest")
    finally:
        stage.close()
