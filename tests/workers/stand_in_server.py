"""An `SglangEngine` over a server that is a table of answers: what the engine asks of it, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state.digest_records import Region, TensorDigest
from state.slots import Slot, WeightId
from workers.batch import FinishReason
from workers.config import ModelConfig, PauseMode, WeightsConfig
from workers.rollout import sglang
from workers.rollout.sglang import SglangEngine
from workers.rollout.sglang_options import SglangOptions
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Endpoint, Rendezvous
from workers.weights.send_plan import SendPlan, plan_send

ENGINE = "run/engine/0"
HELD = TensorDigest("w", "float32", (2,), 0x1234)


class StandInServer:
    """Answers every path with what `answers` says, else with a success; `asked` is what it was told, in order."""

    pid = 1

    def __init__(self, spec: object) -> None:
        self.asked: list[tuple[str, Any]] = []
        digests = {f"{HELD.name} {HELD.dtype} 2 0 2": f"{HELD.value:016x}"}
        proof = {"ranks": [{"checksums": digests, "parallelism_info": {"tp_rank": 0}}]}
        self.answers: dict[str, Callable[[Any], Any]] = {"/weights_checker": lambda body: proof}
        self.client = self

    def post(self, path: str, body: Any, *, limit_s: float) -> Any:
        self.asked.append((path, body))
        return self.answers.get(path, lambda body: {"success": True})(body)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def alive_after(self, within_s: float) -> bool:
        return True

    def stop(self) -> None: ...


class _Delivers:
    """Whatever is planned arrives."""

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, arrives: Callable[[TensorSpec], None]) -> int:
        for tensor in plan.tensors:
            arrives(tensor)
        return plan.nbytes


class StandInStage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_mode: PauseMode = "abort") -> None:
        monkeypatch.setattr(sglang, "SglangServer", StandInServer)
        monkeypatch.setattr(sglang, "_transfer", lambda *_: _Delivers())
        self.engine = SglangEngine(
            ENGINE,
            ModelConfig(hf_checkpoint="/model"),
            SglangOptions(),
            device="cpu",
            max_batch_size=8,
            tokenizer=None,
            weights=WeightsConfig(),
            pause_mode=pause_mode,
            start_timeout_s=1.0,
            log=Path("server.log"),
        )
        server: Any = self.engine._server
        self.server: StandInServer = server

    def publish(self, version: int = 1) -> WeightId:
        manifest = self.update(version)
        self.engine.commit(manifest)
        self.engine.resume()
        return manifest.weights

    def update(self, version: int) -> Manifest:
        """Everything up to the commit."""
        manifest = Manifest("run", f"p{version}", Slot.ACTOR, WeightId(1, version), (HELD,))
        self.engine.pause()
        self.engine.flush()
        self.engine.begin_update(manifest)
        plan = plan_send({HELD.name: ((0, Region.whole(HELD.shape)),)}, [HELD], 64)
        self.engine.receive(plan, Rendezvous((ENGINE,), (Endpoint(0, "127.0.0.1", 1, "t"),)))
        self.engine.prove()
        return manifest


def answer(ids: tuple[int, ...], reason: FinishReason = "stop", **meta: Any) -> dict[str, Any]:
    """A response as the server words it."""
    return {
        "output_ids": list(ids),
        "meta_info": {
            "output_token_logprobs": [[-0.25, one, None] for one in ids],
            "finish_reason": {"type": reason},
            **meta,
        },
    }
