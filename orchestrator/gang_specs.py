"""From a configuration and a plan to what each rank of a gang is told."""

from __future__ import annotations

from orchestrator import slot_plan
from orchestrator.batching import total_steps
from orchestrator.config import Config
from state.gang import GangId
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot, Tier, WorkerId
from workers.megatron.spec import SlotSpec, WorkerSpec


def worker_specs(config: Config, plan: ResumePlan, gang: GangId, run_dir: str, host: str | None) -> list[WorkerSpec]:
    """What each rank is told."""
    slots = [SlotSpec(Slot.ACTOR, plan.load, _version(plan.load, plan), Tier.COPY)]
    tiers = {Slot.REF: config.ref.tier, Slot.TEACHER: config.teacher.tier, Slot.OLD_ACTOR: Tier.COPY}
    for one in slot_plan.auxiliary(config, plan):
        slots.append(SlotSpec(one.slot, one.load, one.version, Tier(tiers[one.slot])))
    return [
        WorkerSpec(
            worker=WorkerId(config.run.name, Slot.ACTOR, rank),
            gang=gang,
            run_dir=run_dir,
            host=host,
            seed=config.run.seed,
            slots=tuple(slots),
            load_optimizer=plan.load_optimizer,
            load_rng=plan.load_rng,
            total_steps=total_steps(config),
            temperature=config.rollout.temperature,
            max_response_len=config.rollout.max_response_len,
            keep_old_actors=slot_plan.keep_old_actors(config),
            ref_update_interval=config.ref.update_interval if config.algorithm.needs_ref else None,
            model=config.model,
            train=config.train,
            algorithm=config.algorithm,
            weights=config.weights,
        )
        for rank in range(config.train.num_workers)
    ]


def _version(load: LoadSpec, plan: ResumePlan) -> int:
    """Rollout steps that the actor's weights were trained for; weights without their optimizer start a new count."""
    return load.iteration + 1 if load.iteration is not None and plan.load_optimizer else 0
