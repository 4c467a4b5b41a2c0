"""What runs on the one rank of test_engine_trainer_parity.py."""

from __future__ import annotations

import torch

from state.digest import Piece
from state.slots import Slot, WeightId
from tests.e2e.runs import TINY
from tests.workers.gang_processes import Place
from workers.batch import Sample
from workers.config import ModelConfig, SamplingConfig
from workers.megatron import parallel
from workers.megatron.cpu import redirect
from workers.megatron.forward import score
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config
from workers.megatron.parallel import Layout
from workers.rollout.embedded import EmbeddedEngine
from workers.rollout.protocol import GenerateRequest
from workers.weights.base import Sink
from workers.weights.buckets import TensorSpec
from workers.weights.manifest import Manifest
from workers.weights.rendezvous import Rendezvous
from workers.weights.send_plan import SendPlan, plan_send

MODEL = ModelConfig(config=TINY["model"]["config"], dtype="float32")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MOE = ModelConfig(config={**TINY["model"]["config"], "model_type": "qwen3_moe", **EXPERTS}, dtype="float32")
PUBLISHED = WeightId(1, 0)


class FromMemory:
    """Stands in for a transport: the tensors are in this process already."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def receive(self, plan: SendPlan, rendezvous: Rendezvous, sink: Sink) -> int:
        for spec in plan.tensors:
            whole = torch.empty(spec.shape)
            for piece in self._pieces:
                if piece.name == spec.name:
                    region = piece.region
                    box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
                    whole[box] = piece.tensor
            sink(TensorSpec(spec.name, spec.dtype, spec.shape), whole)
        return plan.nbytes

    def close(self) -> None:
        return


def ratios(place: Place, model: ModelConfig, temperatures: list[float]) -> dict[float, tuple[float, float]]:
    """By temperature, the smallest and largest importance ratio of fresh samples, trainer against engine."""
    with redirect("cpu"):
        parallel.initialise(place.rank, Layout(1), place.init_method, 0, "cpu", timeout_s=60.0)
        gpt = build(load_hf_config(model), Layout(1), model, {}, seed=3)
    pieces = list(GptWeights(gpt).pieces())
    engine = EmbeddedEngine("engine", model, FromMemory(pieces))
    _publish(engine, pieces)
    found = {}
    for temperature in temperatures:
        samples = _samples(engine, temperature)
        with redirect("cpu"):
            scores = score(gpt, samples, temperature=temperature, max_tokens=512)
        assert scores is not None
        differences = torch.cat(
            [own - torch.tensor(s.logprobs) for own, s in zip(scores.logprobs, samples, strict=True)]
        )
        found[temperature] = (float(differences.min().exp()), float(differences.max().exp()))
    parallel.shutdown()
    return found


def _publish(engine: EmbeddedEngine, pieces: list[Piece]) -> None:
    engine.pause()
    tensors = engine.prove().tensors  # names, shapes and dtypes of this model; the values are the trainer's
    holders: dict[str, tuple[tuple[int, object], ...]] = {}
    for piece in pieces:
        holders[piece.name] = (*holders.get(piece.name, ()), (0, piece.region))
    manifest = Manifest("parity", "publish", Slot.ACTOR, PUBLISHED, tensors)
    engine.begin_update(manifest)
    engine.receive(plan_send(holders, tensors, 1 << 20), Rendezvous(("engine",), ()))
    proven = Manifest("parity", "publish", Slot.ACTOR, PUBLISHED, engine.prove().tensors)
    engine.begin_update(proven)
    engine.receive(plan_send(holders, tensors, 1 << 20), Rendezvous(("engine",), ()))
    engine.prove()
    engine.commit(proven)
    engine.resume()


def _samples(engine: EmbeddedEngine, temperature: float) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    requests = [
        GenerateRequest(str(i), tuple(torch.randint(2, 16, (2 + i % 5,), generator=generator).tolist()), seed=i)
        for i in range(32)
    ]
    sampling = SamplingConfig(temperature=temperature, max_response_len=8)
    return [
        Sample(
            group_id=0,
            index=int(result.request_id),
            prompt_ids=request.prompt_ids,
            response_ids=result.response_ids,
            logprobs=result.logprobs,
            loss_mask=(1,) * len(result.response_ids),
            versions=result.versions,
            seed=request.seed,
            finish_reason=result.finish_reason,
            reward=0.0,
        )
        for request, result in zip(requests, engine.generate(requests, sampling, PUBLISHED), strict=True)
    ]
