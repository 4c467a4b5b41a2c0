"""From a configuration to what each slot is loaded from: reads the checkpoint directories, decides nothing itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.config import Config
from orchestrator.data.context import vocab_size
from orchestrator.resume import changing_slots, critic_plan, critic_saves, data_state
from orchestrator.resume.fingerprints import differing, fingerprints, model_fingerprint
from state import checkpoints
from state.checkpoints import Inventory, Marker, same_place
from state.errors import ResumeError
from state.resume import LoadSpec, NoBase, ResumePlan, ResumeRequest, plan_resume, plan_slot_load


def run_dir(config: Config) -> Path:
    """Absolute directory of the run: `run.dir`, else `runs/NAME`."""
    return Path(config.run.dir or Path("runs") / config.run.name).absolute()


def save_root(config: Config) -> Path | None:
    """Absolute directory that checkpoints are saved to; None when there is none."""
    if config.checkpoint.save is not None:
        return Path(config.checkpoint.save).absolute()
    return run_dir(config) / checkpoints.RUN_SAVES if config.checkpoint.save_interval is not None else None


def load_root(config: Config) -> Path | None:
    """Absolute directory to continue from: `checkpoint.load`, else where checkpoints are saved to."""
    if config.checkpoint.load is not None:
        return Path(config.checkpoint.load).absolute()
    return save_root(config)


def plan(config: Config) -> ResumePlan:
    """What the run starts from, and why. Raises `ResumeError`.

    `checkpoint.load`, where it is another directory than the run saves to, is where the run begins: once it has saved,
    the same command continues from that, as a run and not as weights. Whoever names a `checkpoint.ckpt_step` means it.
    """
    made = _plan_actor(config, config.checkpoint.ckpt_step)
    if not config.algorithm.needs_critic:
        return made
    both = critic_plan.with_critic(config, made, save_root(config), lambda step: _plan_actor(config, step))
    return _with_told_critic(config, both)


def _plan_actor(config: Config, ckpt_step: int | None) -> ResumePlan:
    root, saved, checkpoint = load_root(config), save_root(config), config.checkpoint
    kept = checkpoints.inspect(saved) if saved is not None else None
    may_have_begun = checkpoint.ckpt_step is None and not same_place(saved, root)
    begun = kept is not None and bool(kept.ours) and may_have_begun
    inventory = kept if begun or root is None or root == saved else checkpoints.inspect(root)
    request = ResumeRequest(
        load=inventory.path if inventory is not None else None,
        base=_base(config),
        ckpt_step=ckpt_step,
        mode=config.model.megatron_to_hf_mode,
        resume=checkpoint.resume,
        weights_only=checkpoint.weights_only and not begun,
        start_rollout_id=config.loop.start_rollout_id,
    )
    made = _of_the_same(config, plan_resume(request, inventory), inventory)
    if request.weights_only and made.source == "fresh" and checkpoint.load is not None:
        raise ResumeError(f"checkpoint.weights_only begins with weights, and {request.load} (checkpoint.load) has none")
    if made.source == "native" and not made.load_optimizer and is_saved_over(config, made.path):
        raise ResumeError(
            f"checkpoint.weights_only begins anew at rollout 0 from {made.load}, and this run would save over what is "
            f"there. Keep checkpoint.load {made.path}, and name another checkpoint.save"
        )
    if kept is not None and checkpoint.save_interval is not None:
        _require_room(kept, made)
    unused = f"; checkpoint.load is for its first start, and {saved} holds saves already"
    return replace(made, reason=made.reason + unused) if begun else made


def _require_room(kept: Inventory, made: ResumePlan) -> None:
    """`ResumeError` where the run would come to what it must not save over, with the rollouts before that in vain."""
    ahead = [f"iteration {n}, which is of a critic" for n in kept.critics]
    ahead += [f"iteration {n}, which is Megatron's own" for n in kept.megatron if n >= made.start_rollout_id]
    strangers = [n for n in kept.strangers if n >= made.start_rollout_id]
    ahead += [f"{checkpoints.iteration_dir('', n).name}, which is no checkpoint of ours" for n in strangers]
    if ahead:
        raise ResumeError(
            f"checkpoint.save: {kept.path} holds {ahead[0]}, and this run would save there. Move it away, or name "
            "another checkpoint.save"
        )


def plan_ref(config: Config) -> LoadSpec | None:
    """What the reference is loaded from, at every start; None when no KL term is on. Raises `ResumeError`."""
    if not config.algorithm.needs_ref:
        return None
    if config.ref.load is not None:
        return _slot_load(config, "ref", config.ref.load, config.ref.ckpt_step)
    base = _base(config)
    if isinstance(base, NoBase):
        raise ResumeError(f"the reference has no weights: {base.why}")
    return base


def plan_teacher(config: Config) -> LoadSpec | None:
    """What the teacher is loaded from, at every start; None without distillation. Raises `ResumeError`."""
    if not config.algorithm.use_opd or config.teacher.load is None:
        return None
    return _slot_load(config, "teacher", config.teacher.load, config.teacher.ckpt_step)


def is_saved_over(config: Config, directory: str | None) -> bool:
    """Whether this run saves its checkpoints into `directory`."""
    return config.checkpoint.save_interval is not None and same_place(directory, save_root(config))


def continues_itself(config: Config) -> bool:
    """Whether the same command continues from what this run saves, with everything that it saves."""
    checkpoint = config.checkpoint
    begins_elsewhere = not same_place(load_root(config), save_root(config))
    return (
        checkpoint.save_interval is not None
        and checkpoint.ckpt_step is None
        and config.loop.start_rollout_id is None
        and (begins_elsewhere or not checkpoint.weights_only)
    )


def critic_save_root(config: Config) -> Path | None:
    """Absolute directory that the critic's checkpoints are saved to; None when there is none."""
    return critic_saves.save_root(config, save_root(config))


def protected(config: Config) -> tuple[int, ...]:
    """Iterations that retention must leave, since the same command will ask for them by number again."""
    steps = []
    for frozen in (config.ref, config.teacher):
        if is_saved_over(config, frozen.load):
            steps.append(frozen.ckpt_step)
    if same_place(config.critic.load, critic_save_root(config)):
        steps.append(config.critic.ckpt_step)
    if is_saved_over(config, str(load_root(config))):
        steps.append(config.checkpoint.ckpt_step)
    return tuple(step for step in steps if step is not None)


def _base(config: Config) -> LoadSpec | NoBase:
    """What a fresh actor starts from. A `ref.load` that cannot be used is a problem only where it is needed."""
    model = config.model
    if model.megatron_to_hf_mode == "bridge" and model.hf_checkpoint is not None:
        return LoadSpec(str(Path(model.hf_checkpoint).absolute()), None, "huggingface")
    if config.ref.load is not None:
        try:
            # The reference's step is for the reference alone.
            return _slot_load(config, "ref", config.ref.load, None)
        except ResumeError as error:
            return NoBase(str(error))
    if model.config is not None:
        return LoadSpec.random()
    return NoBase(
        f"model.megatron_to_hf_mode is `raw`, which takes no weights from model.hf_checkpoint. Convert them with "
        f"`slotwise convert {model.hf_checkpoint} OUT` and set checkpoint.load or ref.load to OUT, or set the mode to "
        "`bridge`"
    )


def _slot_load(config: Config, section: str, load: str, ckpt_step: int | None) -> LoadSpec:
    root = Path(load).absolute()
    mode = config.model.megatron_to_hf_mode
    return plan_slot_load(str(root), ckpt_step, checkpoints.inspect(root), mode, section)


def _of_the_same(config: Config, made: ResumePlan, inventory: Inventory | None) -> ResumePlan:
    """`made`, unless the checkpoint is of another model, tokenizer or data than the run. `checkpoint.allow_mismatch`
    makes a warning of that; prompts then begin with the first, since the cursor counts others."""
    iteration = made.iteration
    if inventory is None or made.source != "native" or iteration not in inventory.ours:
        return made
    directory = checkpoints.iteration_dir(inventory.path, iteration)
    marker = checkpoints.read_marker(directory)
    untold = _untold(config, directory, marker)
    others = _others(config, directory, marker, fingerprints(config), but=() if made.load_data else ("data",))
    checkpoints.read_probe(directory)  # what is damaged is refused before anything starts
    warnings = [*untold, *others.values()]
    if made.load_data and {"tokenizer", "data"} & others.keys():
        warnings.append("the data cursor and samples still waiting are left behind: prompts begin with the first")
        made = replace(made, load_data=False, reason=f"{made.reason}; the data cursor is left behind")
    if made.load_data:
        waiting = data_state.read(directory)
        data_state.refuse_groups(waiting, config.loop.mode, directory)
        data_state.refuse_impossible(waiting, iteration + 1, vocab_size(config.model), directory)
    if made.load_optimizer:
        warnings += changing_slots.warnings(config, directory, marker)
    return replace(made, warnings=(*made.warnings, *warnings))


def _with_told_critic(config: Config, made: ResumePlan) -> ResumePlan:
    """`made`, unless the critic's checkpoint does not say what it is, is of another model, or is damaged."""
    assert made.critic is not None
    load = made.critic.load
    if load == made.load or load.path is None or load.iteration is None:
        return made
    directory = checkpoints.iteration_dir(load.path, load.iteration)
    marker = checkpoints.classify(directory, load.iteration)
    if not isinstance(marker, Marker):
        return made
    untold = _untold(config, directory, marker)
    others = _others(config, directory, marker, {"model": model_fingerprint(config)})
    checkpoints.read_probe(directory)
    return replace(made, warnings=(*made.warnings, *untold, *others.values()))


def _others(
    config: Config, directory: Path, marker: Marker, current: Mapping[str, str], but: Collection[str] = ()
) -> dict[str, str]:
    """By kind, in words, what a checkpoint was saved with and the run has another of, as far as
    `checkpoint.allow_mismatch` accepts it; `ResumeError` for the rest. Nobody asks about `but`."""
    found = {kind: pair for kind, pair in differing(marker.fingerprint or {}, current).items() if kind not in but}
    words = {kind: f"{kind} {saved} there, {here} here" for kind, (saved, here) in found.items()}
    if refused := [kind for kind in found if kind not in config.checkpoint.allow_mismatch]:
        raise ResumeError(
            f"{directory} was saved by a run with another {' and another '.join(refused)}: "
            f"{'; '.join(words[kind] for kind in refused)}. Continue with the same, name another checkpoint.load or "
            f"checkpoint.save, or accept it with checkpoint.allow_mismatch [{', '.join(refused)}]"
        )
    continuing = f"checkpoint.allow_mismatch: continuing from {directory}"
    return {kind: f"{continuing} with another {word}" for kind, word in words.items()}


def _untold(config: Config, directory: Path, marker: Marker) -> tuple[str, ...]:
    """In words, what a marker must say and does not, as far as `checkpoint.allow_mismatch` accepts it; `ResumeError`
    for the rest."""
    untold = {}
    if "model" not in (marker.fingerprint or {}):
        untold["model"] = "which model it was saved with (`fingerprint`)"
    if None in (marker.digest, marker.dtype, marker.slots):
        untold["continuity"] = "what bytes were saved (`digest`, `dtype`, `slots`)"
    if refused := [kind for kind in untold if kind not in config.checkpoint.allow_mismatch]:
        raise ResumeError(
            f"{directory / checkpoints.MARKER} does not say {' and '.join(untold[kind] for kind in refused)}, so it "
            "cannot be told whether that is this run's. Name another iteration with checkpoint.ckpt_step, or accept "
            f"this one with checkpoint.allow_mismatch [{', '.join(refused)}]"
        )
    continuing = f"checkpoint.allow_mismatch: continuing from {directory}"
    return tuple(f"{continuing}, which does not say {what}" for what in untold.values())
