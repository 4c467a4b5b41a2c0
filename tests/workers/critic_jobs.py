"""What ranks of a critic do in tests: values and steps on any layout, and whole ranks as the driver uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from state.errors import SlotwiseError
from state.resume import LoadSpec
from state.slots import Slot, Tier, WorkerId
from tests.workers import rank_jobs
from tests.workers.gang_processes import Place
from tests.workers.rank_jobs import agreed, machine_of, save, shard
from tests.workers.train_jobs import Setting, Shards, gang, gradients, parameters
from workers.algorithms.aggregate import StepTotals
from workers.megatron import values
from workers.megatron.estimates import Targets
from workers.megatron.model import build, load_hf_config
from workers.megatron.optimizer import TrainOptimizer, build_optimizer
from workers.megatron.parallel import Layout, coordinates
from workers.megatron.spec import SlotSpec, WorkerSpec
from workers.megatron.values import ValueSample, ValueStats
from workers.megatron.worker import MegatronRank


def make_critic(layout: Layout, setting: Setting) -> tuple[object, TrainOptimizer]:
    hf_config = load_hf_config(setting.model)
    model = build(hf_config, layout, setting.model, setting.train.megatron, seed=5, value_head=True)
    return build_optimizer(model, setting.train, setting.total_steps)


@dataclass(frozen=True)
class Step:
    """`began`: parameters before the step. `values`: before it too, on the last stage alone."""

    began: Shards
    values: tuple[Tensor, ...] | None
    stats: ValueStats
    gradients: Shards
    parameters: Shards


@dataclass(frozen=True)
class Case:
    """`shares`: what each data-parallel rank has of one step."""

    shares: Sequence[Sequence[ValueSample]]
    totals: StepTotals
    budget: int = 64
    value_clip: float | None = None


def steps_of(place: Place, setting: Setting, cases: Sequence[Case]) -> list[Step]:
    """One step from the same weights for each case."""
    with gang(place, setting) as layout:
        told = []
        for case in cases:
            model, optimizer = make_critic(layout, setting)
            mine, seen, began = case.shares[coordinates().dp], [], parameters(model)
            found = values.score(model, [one.sample for one in mine], max_tokens=case.budget)
            stats = values.train_step(
                model,
                optimizer,
                mine,
                case.totals,
                aggregation="token_mean",
                value_clip=case.value_clip,
                max_tokens=case.budget,
                before_write=lambda seen=seen, model=model: seen.append(gradients(model)),
            )
            optimizer.finish_gather()
            told.append(Step(began, found, stats, seen[0], parameters(model)))
        return told


# ---- whole ranks ---------------------------------------------------------------------------------------------

RANDOM = SlotSpec(Slot.CRITIC, LoadSpec.random(), 0, Tier.COPY, fresh_head=True)


def critic_setting(run_dir: Path, slot: SlotSpec = RANDOM, **options: object) -> rank_jobs.Setting:
    made = rank_jobs.Setting(run_dir, slots=(slot,), algorithm=PPO, keep_old_actors=0, ref_update_interval=None)
    return replace(made, **options)  # type: ignore[arg-type]


PPO = rank_jobs.EVERY.model_copy(
    update={"advantage_estimator": "ppo", "old_logprobs": None, "use_opd": False, "use_kl_loss": False}
)


@contextmanager
def critic_of(place: Place, setting: rank_jobs.Setting) -> Iterator[MegatronRank]:
    def as_critic(spec: WorkerSpec) -> WorkerSpec:
        return replace(spec, worker=WorkerId("run", Slot.CRITIC, place.rank), value_clip=0.2)

    with rank_jobs.rank_of(place, setting, as_critic) as rank:
        yield rank


def targets(rank: MegatronRank, rollout_id: int) -> Targets | None:
    """Returns that rise from 0 to 1 over the tokens of each of this rank's samples."""
    samples = shard(rank, rollout_id, 0).samples
    found = rank.values(shard(rank, rollout_id, 0))
    return None if found is None else Targets(found, [torch.linspace(0, 1, len(s.response_ids)) for s in samples])


def refusals(place: Place, setting: rank_jobs.Setting, root: Path) -> dict[str, str]:
    """What a critic says when its weights are to go where only an actor's go, and when asked for what it cannot do."""
    with critic_of(place, setting) as rank:
        rank.train(shard(rank, 0, 0), targets(rank, 0))
        quorum = agreed(rank, "publish-1")
        told = {"publish": _refusal(lambda: rank.begin_publish(quorum))}
        told["state after it"] = machine_of(rank).state
        told["snapshot"] = _refusal(lambda: machine_of(rank).snapshot(Slot.OLD_ACTOR))
        told["experience"] = _refusal(lambda: rank.experience(shard(rank, 1, 0), None))
        told["train"] = _refusal(lambda: rank.train(shard(rank, 1, 0)))
        save(rank, root, 0)
        told["version"] = str(machine_of(rank).view().resident)
        return told


def _refusal(verb: object) -> str:
    assert callable(verb)
    try:
        verb()
    except (SlotwiseError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True)
class Trained:
    metrics: list[dict[str, float]]
    digest: str
    values: list[Tensor] | None


def train_on(place: Place, setting: rank_jobs.Setting, root: Path, start: int, end: int, save_at: int) -> Trained:
    """Rollouts `start` to `end - 1`, saved after `save_at`; digest and values of what it ends with."""
    with critic_of(place, setting) as rank:
        metrics = []
        for rollout_id in range(start, end):
            told = rank.train(shard(rank, rollout_id, 0), targets(rank, rollout_id))
            metrics.append(dict(told or {}))
            if rollout_id == save_at:
                save(rank, root, rollout_id)
        found = rank.values(shard(rank, 0, 0))
        return Trained(metrics, agreed(rank, "end").digest, None if found is None else list(found))


def held_after_init(place: Place, root: Path, slots: Sequence[SlotSpec]) -> list[Shards | str]:
    """What a critic holds that begins with each; or why it does not."""
    told: list[Shards | str] = []
    for number, slot in enumerate(slots):
        try:
            with critic_of(
                replace(place, init_method=f"{place.init_method}-{number}"), critic_setting(root, slot)
            ) as rank:
                told.append(parameters(rank._model))
        except SlotwiseError as error:
            told.append(str(error))
    return told


def save_an_actor(place: Place, setting: rank_jobs.Setting, root: Path, directory: Path) -> None:
    """Natively under `root`, and as a Hugging Face directory."""
    with rank_jobs.rank_of(place, setting) as rank:
        save(rank, root, 0)
        directory.mkdir()
        rank.export(agreed(rank, "export"), str(directory))
