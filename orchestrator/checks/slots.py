"""Which combinations of options about slots cannot be right: references, teachers, behaviour policies, offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.config import Config
from orchestrator.options.problems import Problem
from orchestrator.resume.resuming import is_saved_over
from state.config import RefConfig, TeacherConfig

_KL_OFF = "switch the KL loss off with both flags: --no-algorithm.use_kl_loss --algorithm.kl_loss_coef 0"


def _kl(config: Config) -> Iterator[Problem]:
    algorithm, ref, model = config.algorithm, config.ref, config.model
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield Problem(
            "algorithm.kl_loss_coef",
            f"algorithm.use_kl_loss is on with a coefficient of 0; set it above 0, or {_KL_OFF}",
        )
    if not algorithm.use_kl_loss and algorithm.kl_loss_coef > 0:
        yield Problem(
            "algorithm.use_kl_loss",
            f"algorithm.kl_loss_coef {algorithm.kl_loss_coef} is set but unused; set this to true, or {_KL_OFF}",
        )
    has_source = ref.load is not None or model.config is not None
    has_source |= model.hf_checkpoint is not None and model.megatron_to_hf_mode == "bridge"
    if algorithm.needs_ref and not has_source:
        hint = ""
        if model.hf_checkpoint is not None:
            hint = (
                f" (in `raw` mode model.hf_checkpoint gives no weights: `slotwise convert {model.hf_checkpoint} OUT` "
                "and ref.load OUT, or set model.megatron_to_hf_mode to bridge)"
            )
        yield Problem("ref.load", f"a KL term is on, but there are no weights for the reference; set this{hint}")
    if ref.update_interval is not None and not algorithm.needs_ref:
        yield Problem(
            "ref.update_interval", "refreshes a reference that nothing uses; switch a KL term on, or leave it"
        )
    yield from _frozen_slot(config, "ref", config.ref)


def _frozen_slot(config: Config, section: str, slot: RefConfig | TeacherConfig) -> Iterator[Problem]:
    if slot.load == "":
        yield Problem(f"{section}.load", "is empty; give a directory or leave it out")
    if slot.ckpt_step is not None and slot.load is None:
        yield Problem(f"{section}.ckpt_step", f"is an iteration of {section}.load, which is not set")
    if is_saved_over(config, slot.load) and slot.ckpt_step is None:
        yield Problem(
            f"{section}.load",
            f"{slot.load} is where this run saves, so the {section} would move to the newest checkpoint at every "
            f"start; name its iteration with {section}.ckpt_step, or save elsewhere",
        )


def _distillation(config: Config) -> Iterator[Problem]:
    algorithm, teacher = config.algorithm, config.teacher
    if algorithm.use_opd and algorithm.opd_kl_coef == 0:
        yield Problem("algorithm.opd_kl_coef", "algorithm.use_opd is on with a coefficient of 0; set it above 0")
    if algorithm.use_opd and teacher.load is None:
        yield Problem(
            "teacher.load",
            "algorithm.use_opd needs a teacher of the same architecture: give its checkpoint (or, with "
            "model.megatron_to_hf_mode `bridge`, its Hugging Face directory)",
        )
    if not algorithm.use_opd:
        if teacher.load is not None:
            yield Problem("teacher.load", "is set, but nothing distils; set algorithm.use_opd, or leave it out")
        if algorithm.advantage_estimator == "on_policy_distillation":
            yield Problem(
                "algorithm.advantage_estimator",
                "on_policy_distillation learns from the teacher alone; set algorithm.use_opd and teacher.load",
            )
    yield from _frozen_slot(config, "teacher", teacher)


def _old_logprobs(config: Config) -> Iterator[Problem]:
    chosen, interval = config.algorithm.old_logprobs, config.loop.update_weights_interval
    key = "algorithm.old_logprobs"
    if config.loop.mode != "sync":
        if chosen is None:
            yield Problem(
                key,
                "an asynchronous loop trains on samples of earlier weights and must say whose log-probs the ratio is "
                "taken to: `engine` (those that the engine recorded; right here), `old_actor` (by a copy of the "
                "weights that generated each sample; right here), or `recompute` (the trainer's own; right only in a "
                "`sync` loop that publishes after every rollout). Only `engine` lets a `fully_async` loop go on with a "
                "response that a publish cut off",
            )
        elif chosen == "recompute":
            yield Problem(
                key,
                "in an asynchronous loop the trainer has moved on from the weights that generated the samples, so "
                "`recompute` is not the behaviour policy; use `engine` or `old_actor`",
            )
    elif interval > 1 and chosen in (None, "recompute"):
        yield Problem(
            key,
            f"with loop.update_weights_interval {interval} the engines generate from older weights than the trainer "
            "holds, so `recompute` (the default) is not the behaviour policy; use `engine` or `old_actor`, or an "
            "interval of 1",
        )
    if config.old_actor.keep > 2 and chosen != "old_actor":
        yield Problem("old_actor.keep", "keeps versions that nothing uses; set algorithm.old_logprobs to old_actor")


def _offload(config: Config) -> Iterator[Problem]:
    if config.cluster.offload_train and config.loop.mode != "sync":
        yield Problem(
            "cluster.offload_train",
            f"in loop.mode {config.loop.mode} trainers train while engines generate, so nothing can be freed; use a "
            "`sync` loop, or leave it out",
        )


CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (_kl, _distillation, _old_logprobs, _offload)
