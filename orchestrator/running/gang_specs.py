"""From a configuration and a plan to what each rank of a gang is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.batching import total_steps
from orchestrator.config import Config
from orchestrator.resume import slot_plan
from state.gang import GangId
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot, Tier, WorkerId
from workers.config import OptimizerConfig, TrainConfig
from workers.megatron.spec import SlotSpec, WorkerSpec


def worker_specs(config: Config, plan: ResumePlan, gang: GangId, run_dir: str, host: str | None) -> list[WorkerSpec]:
    """What each rank of the actor's gang is told."""
    slots = [SlotSpec(Slot.ACTOR, plan.load, _version(plan.load, plan.load_optimizer), Tier.COPY)]
    tiers = {Slot.REF: config.ref.tier, Slot.TEACHER: config.teacher.tier, Slot.OLD_ACTOR: Tier.COPY}
    for one in slot_plan.auxiliary(config, plan):
        slots.append(SlotSpec(one.slot, one.load, one.version, Tier(tiers[one.slot])))
    first = _first_rank(config, gang, run_dir, host, slots, config.train)
    return _on_every_rank(
        replace(
            first,
            load_optimizer=plan.load_optimizer,
            load_rng=plan.load_rng,
            keep_old_actors=slot_plan.keep_old_actors(config),
            ref_update_interval=config.ref.update_interval if config.algorithm.needs_ref else None,
        )
    )


def critic_specs(config: Config, plan: ResumePlan, gang: GangId, run_dir: str, host: str | None) -> list[WorkerSpec]:
    """What each rank of the critic's gang is told; nothing of the actor's slots is in it, nor of its optimizer."""
    start = plan.critic
    assert start is not None
    version = _version(start.load, start.load_optimizer)
    slots = [SlotSpec(Slot.CRITIC, start.load, version, Tier.COPY, start.fresh_head)]
    first = _first_rank(config, gang, run_dir, host, slots, critic_train(config))
    return _on_every_rank(
        replace(
            first,
            load_optimizer=start.load_optimizer,
            load_rng=start.load_optimizer and plan.load_rng,
            value_clip=config.critic.value_clip,
        )
    )


def critic_train(config: Config) -> TrainConfig:
    """Layout, micro-batches and resources of `train`, with the optimizer of `critic`."""
    own = {name: value for name, value in config.critic if name in OptimizerConfig.model_fields}
    return config.train.model_copy(update=own)


def _first_rank(
    config: Config, gang: GangId, run_dir: str, host: str | None, slots: Sequence[SlotSpec], train: TrainConfig
) -> WorkerSpec:
    """Rank 0 of a gang whose primary is the first of `slots`; that it fills with weights alone, and holds nothing that
    one role has and the other has not."""
    return WorkerSpec(
        worker=WorkerId(config.run.name, slots[0].slot, 0),
        gang=gang,
        run_dir=run_dir,
        host=host,
        seed=config.run.seed,
        slots=tuple(slots),
        load_optimizer=False,
        load_rng=False,
        total_steps=total_steps(config),
        temperature=config.rollout.temperature,
        max_response_len=config.rollout.max_response_len,
        keep_old_actors=0,
        ref_update_interval=None,
        value_clip=None,
        model=config.model,
        train=train,
        algorithm=config.algorithm,
        weights=config.weights,
    )


def _on_every_rank(first: WorkerSpec) -> list[WorkerSpec]:
    return [replace(first, worker=replace(first.worker, rank=rank)) for rank in range(first.train.num_workers)]


def _version(load: LoadSpec, with_optimizer: bool) -> int:
    """Rollout steps that a primary's weights were trained for; weights without their optimizer start a new count."""
    return load.iteration + 1 if load.iteration is not None and with_optimizer else 0
