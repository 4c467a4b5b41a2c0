"""What a critic starts from, beside what its actor does: reads directories, decides little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.config import Config
from orchestrator.resume.critic_saves import beside, left_behind, require_room, save_root, saves
from state import checkpoints
from state.checkpoints import Inventory, same_place
from state.errors import ResumeError
from state.resume import CriticLoad, LoadSpec, ResumePlan, plan_slot_load
from state.resume_pair import pair, pairs
from state.slots import Slot


def with_critic(config: Config, made: ResumePlan, own: Path | None, replan: Callable[[int], ResumePlan]) -> ResumePlan:
    """`made`, the actor's, with what the critic starts from; from another iteration where the critic lacks that one.

    `own`: where the run's actor is saved. `replan`: the actor's plan from an iteration. Raises `ResumeError`.
    """
    to = save_root(config, own)
    require_room(to, own, config.critic.save)
    if not made.load_optimizer:
        begins = _beginning(config, made)
        return replace(made, critic=begins, warnings=(*made.warnings, *left_behind(begins, to)))
    assert made.path is not None
    assert made.iteration is not None
    root = Path(made.path)
    if same_place(root, own):
        return _continued(config, made, to, replan)
    if config.critic.load is None:
        return _together(config, made, checkpoints.inspect(beside(root)), replan)
    given = checkpoints.inspect(Path(config.critic.load).absolute())
    if given.is_empty or _is_policy(given):
        return replace(made, critic=_given(config, given))
    if given.ours and not given.critics:
        kept = checkpoints.inspect(beside(root)).critics
        instead = f"Leave it out to continue with the critic that was saved with the actor ({beside(root)}), or name"
        raise ResumeError(
            f"critic.load: {given.path} holds an actor's iterations and no critic's. {instead if kept else 'Name'} "
            "where a critic was saved"
        )
    _require_one_step(config, made, given.path)
    return _together(config, made, given, replan, "critic.load ")


def _continued(config: Config, made: ResumePlan, to: Path | None, replan: Callable[[int], ResumePlan]) -> ResumePlan:
    """From what this run saved itself: `critic.load` was for its first start, where it is another directory."""
    assert to is not None
    began = config.critic.load is not None and not same_place(config.critic.load, to)
    if not began:
        _require_one_step(config, made, str(to))
    both = _together(config, made, checkpoints.inspect(to), replan)
    return replace(both, reason=f"{both.reason}; critic.load is for its first start") if began else both


def _require_one_step(config: Config, made: ResumePlan, critics: str) -> None:
    if config.critic.ckpt_step not in (None, made.iteration):
        raise ResumeError(
            f"the actor continues from iteration {made.iteration} of {made.path}, and critic.ckpt_step asks for "
            f"iteration {config.critic.ckpt_step} of {critics}: both have to continue from one. Name one "
            "checkpoint.ckpt_step for both, and leave out critic.ckpt_step"
        )


def _together(
    config: Config, made: ResumePlan, critics: Inventory, replan: Callable[[int], ResumePlan], option: str = ""
) -> ResumePlan:
    """Both continue from one iteration. `option` led to `critics`."""
    assert made.path is not None
    assert made.iteration is not None
    must = config.checkpoint.resume == "must" or config.checkpoint.ckpt_step is not None
    # Whoever names a critic for what Megatron wrote says that they belong together: nothing else does.
    actor = saves(checkpoints.inspect(made.path), Slot.ACTOR, with_megatrons=bool(option))
    found = pair(made.iteration, actor, saves(critics, Slot.CRITIC, option), must=must)
    if found.warning is not None:
        made = replan(found.iteration)
        reason = f"iteration {found.iteration} is the newest that actor and critic both have: {_what(made)}"
        made = replace(made, reason=reason, warnings=(found.warning, *made.warnings))
    load = LoadSpec(critics.path, found.iteration, "native")
    return replace(made, critic=CriticLoad(load, load_optimizer=True, fresh_head=False))


def _beginning(config: Config, made: ResumePlan) -> CriticLoad:
    """Weights alone: what the actor begins with, unless there is something of a critic's own."""
    if config.critic.load is not None:
        return _given(config, checkpoints.inspect(Path(config.critic.load).absolute()))
    if made.source == "native" and made.path is not None and made.iteration is not None:
        there = checkpoints.inspect(beside(Path(made.path)))
        actor, critic = saves(checkpoints.inspect(made.path), Slot.ACTOR), saves(there, Slot.CRITIC)
        if made.iteration in pairs(actor, critic):
            return CriticLoad(LoadSpec(there.path, made.iteration, "native"), load_optimizer=False, fresh_head=False)
        if made.iteration in actor.critics:
            another = f"iteration {made.iteration} in {there.path} was saved with another actor"
            why = another if made.iteration in critic.critics else str(critic)
            raise ResumeError(
                f"the critic that was saved with {made.load} is not there: {why}. Name another iteration with "
                f"checkpoint.ckpt_step, or what the critic begins with: critic.load {made.path} for a fresh one"
            )
    return CriticLoad(made.load, load_optimizer=False, fresh_head=True)


def _given(config: Config, inventory: Inventory) -> CriticLoad:
    """Weights of `critic.load`; `ResumeError` where there are none."""
    mode = config.model.megatron_to_hf_mode
    load = plan_slot_load(inventory.path, config.critic.ckpt_step, inventory, mode, "critic")
    return CriticLoad(load, load_optimizer=False, fresh_head=load.iteration not in inventory.critics)


def _is_policy(inventory: Inventory) -> bool:
    """Whether there are weights without an iteration of a run: what `slotwise convert` made, or Hugging Face's."""
    return inventory.is_huggingface or (inventory.has_release and not inventory.ours)


def _what(plan: ResumePlan) -> str:
    return f"weights, optimizer, random state{' and data cursor' if plan.load_data else ''}"
