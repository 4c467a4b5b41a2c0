"""A rollout engine outside of this process: an SGLang server that this engine starts, watches and ends.

The server starts with random tensors. It is unpatched; what proves its weights is loaded by its own plug-in framework
(`sglang_plugin.py`). Its labels and success flags prove nothing, and are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from state.digest_records import TensorDigest
from state.slots import WeightId
from workers.batch import FinishReason
from workers.config import ModelConfig, PauseMode, SamplingConfig, WeightsConfig
from workers.device import Device
from workers.rollout import sglang_plugin
from workers.rollout.claim import EngineClaim
from workers.rollout.protocol import (
    EngineDied,
    EngineRefused,
    EngineView,
    GenerateRequest,
    GenerateResult,
    Proof,
    WeightsMismatch,
)
from workers.rollout.sglang_client import ServerRefused, ServerSilent, SglangClient
from workers.rollout.sglang_disk import SglangFromDisk
from workers.rollout.sglang_ipc import SglangFromMemory
from workers.rollout.sglang_options import MODELS, SglangOptions
from workers.rollout.sglang_proof import compose
from workers.rollout.sglang_server import ServerSpec, SglangServer
from workers.rollout.sglang_transfer import SglangTransfer
from workers.weights.errors import TransportError
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan

_NO_LIMIT_S = 24 * 3600.0
"""Whoever asks for responses limits the wait."""

_DYING_S = 5.0
"""A server closes its connections a moment before its process has ended."""


class SglangEngine:
    """See `RolloutEngine`. Any verb may be called from any thread.

    `tokenizer` (a directory) is needed for stop strings. `log` is where the server writes. Raises `ServerDied` when
    the server does not come up, and `WeightsMismatch` when what it holds has no known layout, so that no publish could
    ever be proven.
    """

    def __init__(
        self,
        engine_id: str,
        model: ModelConfig,
        options: SglangOptions,
        *,
        device: Device,
        max_batch_size: int,
        tokenizer: str | None,
        weights: WeightsConfig,
        pause_mode: PauseMode = "abort",
        start_timeout_s: float,
        log: Path,
    ) -> None:
        self._engine_id, self._has_tokenizer, self._pause_mode = engine_id, tokenizer is not None, pause_mode
        self._tp_size, self._timeout_s = options.tp_size, weights.timeout_s
        self._server = SglangServer(
            ServerSpec(
                name=engine_id,
                model=describe(model),
                tokenizer=tokenizer,
                dtype=model.dtype,
                device=device,
                max_batch_size=max_batch_size,
                options=options,
                log=log,
                start_timeout_s=start_timeout_s,
            )
        )
        try:
            self._transfer = _transfer(weights, engine_id, self._server.client, device, options.tp_size)
            model_tensors = {t.name: (t.dtype, t.shape) for t in self._digests()}
            self._claim = EngineClaim(engine_id, model_tensors, keeps=pause_mode == "retract")
        except BaseException:
            self._server.stop()
            raise

    def __repr__(self) -> str:
        return f"SglangEngine({self._engine_id})"

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> tuple[GenerateResult, ...]:
        if sampling.stop and not self._has_tokenizer:
            raise ValueError(f"{self._engine_id} has no tokenizer, which stop strings need: set model.tokenizer")
        with self._claim.generating(requests, expected):
            if not requests:
                return ()
            body = {
                "input_ids": [list(request.prompt_ids) for request in requests],
                "sampling_params": [sampling_params(sampling, request) for request in requests],
                "return_logprob": True,
            }
            answers = self._post("/generate", body, limit_s=_NO_LIMIT_S)
            read = read_result if self._pause_mode == "abort" else read_continued
            return tuple(read(r, a, expected) for r, a in zip(requests, answers, strict=True))

    def pause(self) -> None:
        self._claim.pause()
        self._post("/pause_generation", {"mode": self._pause_mode})

    def resume(self) -> None:
        self._claim.resume()
        self._post("/continue_generation", {"torch_empty_cache": False})

    def flush(self) -> None:
        """A request that reaches a paused server waits there unseen, and would be answered by the next weights: it is
        let in for a moment, and ended with the others, before this is refused."""
        try:
            self._claim.refuse_flush_in_flight()
        except EngineRefused:
            self._post("/continue_generation", {"torch_empty_cache": False})
            self._post("/pause_generation", {"mode": "abort"})
            raise
        self._flush()

    def begin_update(self, manifest: Manifest) -> None:
        self._claim.begin_update(manifest)

    def receive(self, plan: SendPlan, rendezvous: Rendezvous) -> int:
        """What the former weights had computed is dropped once more at the end: a server that says its update was a
        success goes on answering from it."""
        with self._claim.receiving(plan):
            try:
                received = self._transfer.receive(plan, rendezvous, self._claim.arrives)
            except TransportError:
                self._refuse_if_dead(_DYING_S)
                raise
            self._flush()
            return received

    def prove(self) -> Proof:
        update = self._claim.to_prove()
        tensors = self._digests()
        self._claim.proven(update, tensors)
        return Proof(self._engine_id, update.publish_id if update else None, tensors)

    def commit(self, manifest: Manifest) -> None:
        """The server is told the version too, for those who look at it."""
        self._claim.commit(manifest)
        self._post("/update_weight_version", {"new_version": str(manifest.weights), "abort_all_requests": False})

    def abort(self, reason: str) -> None:
        """Requests that wait in the server for weights that will not come are ended."""
        self._claim.give_up(reason)
        if self._pause_mode == "retract":
            self._post("/pause_generation", {"mode": "abort"})

    def view(self) -> EngineView:
        """`EngineDied` once the server's process has ended."""
        self._refuse_if_dead()
        return self._claim.view(self._server.pid)

    def close(self) -> None:
        """End the server; returns when every process of it is gone."""
        self._server.stop()

    def _digests(self) -> tuple[TensorDigest, ...]:
        """Hashed by the server's own processes over what they hold, and added up."""
        try:
            answer = self._post("/weights_checker", {"action": sglang_plugin.ACTION})
        except EngineRefused as refusal:
            raise WeightsMismatch(f"{self._engine_id} cannot prove what it holds: {refusal}") from refusal
        return compose(answer["ranks"], self._tp_size)

    def _flush(self) -> None:
        self._post("/flush_cache", {})

    def _post(self, path: str, body: dict[str, Any], *, limit_s: float | None = None) -> Any:
        try:
            return self._server.client.post(path, body, limit_s=limit_s or self._timeout_s)
        except ServerRefused as refusal:
            raise EngineRefused(f"{self._engine_id}: {refusal}") from refusal
        except ServerSilent:
            self._refuse_if_dead(_DYING_S)
            raise

    def _refuse_if_dead(self, within_s: float = 0.0) -> None:
        if not self._server.alive_after(within_s):
            raise EngineDied(self._server.why_dead())


def _transfer(
    weights: WeightsConfig, engine_id: str, client: SglangClient, device: Device, tp_size: int
) -> SglangTransfer | SglangFromDisk | SglangFromMemory:
    match weights.transport:
        case "distributed":
            return SglangTransfer(engine_id, client, device=device, tp_size=tp_size, timeout_s=weights.timeout_s)
        case "disk":
            return SglangFromDisk(engine_id, client, tp_size=tp_size, timeout_s=weights.timeout_s)
        case "ipc":
            return SglangFromMemory(engine_id, client, timeout_s=weights.timeout_s)


def describe(model: ModelConfig) -> str:
    """The directory of a model, or the text of a `config.json`, complete so that no version of a library fills in
    defaults of its own."""
    if model.hf_checkpoint is not None:
        return model.hf_checkpoint
    if model.config is None:
        raise ValueError("an engine needs model.config or model.hf_checkpoint")
    from transformers import AutoConfig

    config = AutoConfig.for_model(**model.config)
    config.architectures = [MODELS[config.model_type]]
    return str(config.to_json_string(use_diff=False))


def sampling_params(sampling: SamplingConfig, request: GenerateRequest) -> dict[str, Any]:
    """Of one request, in the server's words."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": request.room(sampling),
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": signed(request.seed),
    }


def signed(seed: int) -> int:
    """Mod 2^64, as the int64 that the server takes."""
    wrapped = seed & ((1 << 64) - 1)
    return wrapped - (1 << 64) if wrapped >> 63 else wrapped


def read_result(request: GenerateRequest, answer: dict[str, Any], expected: WeightId) -> GenerateResult:
    """One response from the server's answer. An aborted one may lack everything: it has the tokens that it has.

    Which weights generated it is what this engine knows, not what the server's label says.
    """
    meta = answer["meta_info"]
    chosen = meta.get("output_token_logprobs") or []
    reason: FinishReason = _REASONS[(meta.get("finish_reason") or {"type": "abort"})["type"]]
    ids = tuple(int(entry[1]) for entry in chosen)
    return GenerateResult(request.request_id, ids, tuple(float(entry[0]) for entry in chosen), reason, (expected,))


def read_continued(request: GenerateRequest, answer: dict[str, Any], expected: WeightId) -> GenerateResult:
    """One response that may have waited while the server got other weights, once or several times.

    The server counts tokens by the versions that it was told, which are those that were committed. `WeightsMismatch`
    when it names another, so that nobody knows whose tokens these are.
    """
    result = read_result(request, answer, expected)
    spans = answer["meta_info"].get("weight_versions")
    if spans is None:
        if result.response_ids:
            raise WeightsMismatch(f"the server does not say which weights wrote response {request.request_id}")
        return result
    written = [span for span in spans if span["end"] > span["start"]]
    try:
        versions = tuple(WeightId.parse(span["version"]) for span in written) or (expected,)
    except ValueError as error:
        raise WeightsMismatch(f"the server says of response {request.request_id}: {error}") from error
    if versions[0] < expected or sorted(set(versions)) != list(versions):
        raise WeightsMismatch(
            f"the server says that response {request.request_id}, asked of {expected}, is by "
            f"{', '.join(map(str, versions))}"
        )
    return replace(result, versions=versions, handovers=tuple(span["start"] for span in written[1:]))


_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
