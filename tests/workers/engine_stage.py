"""Engines of every kind, and a trainer that publishes to them over a real process group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orchestrator.checks.sglang_fields import says_who_wrote
from state.digest import Piece, digest_tensor
from state.digest_records import Region, TensorDigest
from state.gang import Quorum, mint_permit
from state.slots import Slot, WeightId
from workers.config import ModelConfig, PauseMode, WeightsConfig
from workers.rollout.embedded import EmbeddedEngine
from workers.rollout.protocol import mismatches
from workers.rollout.sglang import SglangEngine
from workers.rollout.sglang_options import SglangOptions
from workers.rollout.transformers_layout import named_tensors
from workers.weights.base import Sender
from workers.weights.distributed import DistributedReceiver, DistributedSender
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous, members
from workers.weights.send_plan import SendPlan, plan_send

ENGINE = "run/engine/0"
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0
REPO = Path(__file__).parents[2]
TOKENIZER = str(REPO / "examples" / "quickstart")
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@cache
def sglang_python() -> str:
    """The interpreter that has SGLang; skips the test that asks where there is none."""
    python = os.environ.get("SLOTWISE_SGLANG_PYTHON", str(REPO / ".venv-sglang" / "bin" / "python"))
    if not Path(python).is_file():
        pytest.skip(f"no SGLang here ({python} is not there): `make test-sglang` installs one")
    probe = "import importlib.util as u; print(u.find_spec('sglang') is not None)"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    if found.stdout.strip() != "True":
        pytest.skip(f"{python} has no SGLang")
    return python


def needs_who_wrote() -> None:
    """Skips the test that asks where the server does not say which weights wrote which tokens."""
    if not says_who_wrote(sglang_python(), None):
        pytest.skip(f"the SGLang of {sglang_python()} does not say which weights wrote which tokens")


def reference(config: Mapping[str, Any] = QWEN3, seed: int = 0) -> PreTrainedModel:
    """A model far from uniform, so that wrong weights show."""
    torch.manual_seed(seed)
    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


def digests_of(tensors: Mapping[str, Tensor]) -> tuple[TensorDigest, ...]:
    return tuple(digest_tensor(name, tensors[name]) for name in sorted(tensors))


def manifest_of(tensors: Mapping[str, Tensor], version: int) -> Manifest:
    return Manifest("run", f"p{version}", Slot.ACTOR, WeightId(1, version), digests_of(tensors))


class Weights:
    """Live weights of a trainer of one rank."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = named

    def tensors(self) -> Mapping[str, Tensor]:
        return self.named

    def pieces(self) -> Iterable[Piece]:
        return [Piece(n, Region.whole(t.shape), t) for n, t in self.named.items()]


@dataclass
class Stage:
    """One engine and its trainer. `version` counts up over everything that was published."""

    engine: Any
    tp_size: int = 1
    bucket_bytes: int = 4096
    version: int = 0
    sender: Sender = field(
        default_factory=lambda: DistributedSender(0, host=LOOPBACK, device="cpu", timeout_s=TIMEOUT_S)
    )

    def begin(self, tensors: Mapping[str, Tensor]) -> Manifest:
        self.version += 1
        manifest = manifest_of(tensors, self.version)
        self.engine.pause()
        self.engine.flush()
        self.engine.begin_update(manifest)
        return manifest

    def transfer(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
        plan, group = self.plan(manifest), members((ENGINE,), self.tp_size)
        endpoint = self.sender.listen(plan, group)
        assert endpoint is not None
        quorum = Quorum(manifest.publish_id, "run", "actor", Slot.ACTOR, manifest.weights, "", (), (), (), {})
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.sender.send, mint_permit(quorum, "publish"), plan, Weights(tensors))
            received = self.engine.receive(plan, Rendezvous(group, (endpoint,)))
            assert sending.result() == received
        return int(received)

    def plan(self, manifest: Manifest) -> SendPlan:
        holders = {t.name: ((0, Region.whole(t.shape)),) for t in manifest.tensors}
        return plan_send(holders, manifest.tensors, self.bucket_bytes)

    def publish(self, tensors: Mapping[str, Tensor]) -> WeightId:
        manifest = self.begin(tensors)
        self.transfer(manifest, tensors)
        assert mismatches(manifest.tensors, self.engine.prove().tensors) == ()
        self.engine.commit(manifest)
        self.engine.resume()
        return manifest.weights

    def close(self) -> None:
        self.sender.close()
        self.engine.close()


def embedded_stage(config: Mapping[str, Any] = QWEN3) -> Stage:
    receiver = DistributedReceiver(ENGINE, device="cpu", timeout_s=TIMEOUT_S)
    model = ModelConfig(config=dict(config), dtype="float32")
    return Stage(EmbeddedEngine(ENGINE, model, receiver, tokenizer=TOKENIZER))


def sglang_stage(
    log: Path,
    config: Mapping[str, Any] = QWEN3,
    *,
    tp_size: int = 1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    pause_mode: PauseMode = "abort",
) -> Stage:
    engine = SglangEngine(
        ENGINE,
        ModelConfig(config=dict(config), dtype=dtype),
        SglangOptions(python=sglang_python(), tp_size=tp_size),
        device="cpu",
        max_batch_size=256,
        tokenizer=TOKENIZER,
        weights=WeightsConfig(timeout_s=TIMEOUT_S),
        pause_mode=pause_mode,
        start_timeout_s=120.0,
        log=log,
    )
    return Stage(engine, tp_size)
