"""Which configurations cannot be right, though each option is valid by itself. Pure: looks at values alone."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.batching import data_parallel_size, samples_per_rollout, steps_per_rollout, total_steps
from orchestrator.checks import critic, data, debug, loop, megatron, model, paths, slots
from orchestrator.checks.divisors import divisors, listed
from orchestrator.checks.sglang import sglang
from orchestrator.checks.transport import directory
from orchestrator.config import Config
from orchestrator.data.generators import GENERATORS
from orchestrator.filters.registry import FILTERS
from orchestrator.options.imports import did_you_mean, is_import_path
from orchestrator.options.problems import Problem
from orchestrator.rewards.registry import REWARDS
from orchestrator.running import exporting
from workers.config import OptimizerConfig

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2", "llama")


def problems(config: Config) -> tuple[Problem, ...]:
    """Everything that is wrong with a combination of options; empty when it can run."""
    checks = (
        _run,
        *loop.CHECKS,
        _layout,
        _batch,
        _model,
        model.check,
        *slots.CHECKS,
        critic.check,
        sglang,
        directory,
        _sampling,
        _schedule,
        _transport,
        data.check,
        _evaluation,
        _checkpoint,
        exporting.check,
        paths.check,
        debug.check,
        _names,
        megatron.check,
    )
    return tuple(problem for check in checks for problem in check(config))


def _run(config: Config) -> Iterator[Problem]:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        yield Problem("run.name", f"{name!r} cannot name a directory; use letters, digits, `-` and `_`")


def _layout(config: Config) -> Iterator[Problem]:
    train = config.train
    tp, pp = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    if train.num_workers % (tp * pp):
        yield Problem(
            "train.num_workers",
            f"{train.num_workers} workers cannot be split into replicas of {tp} x {pp} ranks "
            f"(tensor_model_parallel_size x pipeline_model_parallel_size); use a multiple of {tp * pp}",
        )


def _batch(config: Config) -> Iterator[Problem]:
    train, rollout = config.train, config.rollout
    if train.global_batch_size is not None and train.num_steps_per_rollout is not None:
        yield Problem("train.global_batch_size", "give this or train.num_steps_per_rollout, not both")
        return
    dp = data_parallel_size(config)
    if dp == 0 or train.num_workers % dp:
        return  # said by the layout
    samples = samples_per_rollout(config)
    inputs = (
        f"rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt} = "
        f"{samples} samples per rollout"
    )
    per_rank = f" over {dp} data-parallel ranks (num_workers {train.num_workers})" if dp > 1 else ""
    of_a_rank, steps = samples // dp, steps_per_rollout(config)
    if samples % dp:
        yield Problem(
            "rollout.rollout_batch_size",
            f"{inputs} cannot be divided{per_rank}; make the product a multiple of {dp}",
        )
    elif train.global_batch_size is not None and (samples % train.global_batch_size or train.global_batch_size % dp):
        yield Problem(
            "train.global_batch_size",
            f"{inputs} cannot be cut into steps of global_batch_size {train.global_batch_size}{per_rank}; "
            f"valid: {listed([n * dp for n in divisors(of_a_rank)])}",
        )
    elif train.global_batch_size is None and of_a_rank % steps:
        yield Problem(
            "train.num_steps_per_rollout",
            f"{inputs} cannot be cut into {steps} steps{per_rank}; valid: {listed(divisors(of_a_rank))}",
        )


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.hf_checkpoint is not None and model.config is not None:
        yield Problem("model.config", "give this or model.hf_checkpoint, not both")
    if model.hf_checkpoint is None and model.config is None:
        yield Problem("model.hf_checkpoint", "no model: give this (a Hugging Face directory) or model.config")
    if model.config is not None:
        kind = model.config.get("model_type")
        if kind not in MODEL_TYPES:
            given = f"there is no model_type {kind!r}" if "model_type" in model.config else "model_type is missing"
            yield Problem("model.config.model_type", f"{given}; valid: {', '.join(MODEL_TYPES)}")
        if model.tokenizer is None:
            yield Problem("model.tokenizer", "needed with model.config, which names no directory to take one from")


def _sampling(config: Config) -> Iterator[Problem]:
    if config.loop.num_rollout == 0:
        return
    if config.rollout.temperature == 0:
        yield Problem(
            "rollout.temperature",
            "0 is greedy: log-probs are not defined and all samples of a prompt are equal. Use a value above 0 in "
            "training (1.0 is usual); eval.sampling.temperature may be 0",
        )
    if config.rollout.n_samples_per_prompt == 1 and config.algorithm.advantage_estimator == "grpo":
        yield Problem(
            "rollout.n_samples_per_prompt",
            "1 leaves grpo nothing to compare within a group, so every advantage is 0; use at least 2",
        )
    if config.rollout.n_samples_per_prompt == 1 and config.rollout.filter == "unequal_rewards":
        yield Problem("rollout.filter", "unequal_rewards refuses every group of one; use n_samples_per_prompt above 1")


def _transport(config: Config) -> Iterator[Problem]:
    worker, engine = config.train.gpus_per_worker, config.rollout.gpus_per_engine
    if config.weights.transport != "disk" and (worker > 0) != (engine > 0):
        yield Problem(
            "rollout.gpus_per_engine",
            f"is {engine:g} while train.gpus_per_worker is {worker:g}: weights travel between GPUs or between CPUs, "
            "not from one kind to the other; set both, or neither, or take the transport `disk`",
        )
    elif config.weights.transport == "distributed" and (0 < worker < 1 or 0 < engine < 1):
        yield Problem(
            "weights.transport",
            f"`distributed` needs a GPU of its own for every worker and engine (train.gpus_per_worker {worker:g}, "
            f"rollout.gpus_per_engine {engine:g}): nccl refuses two processes on one; share with `ipc`",
        )


def _schedule(config: Config) -> Iterator[Problem]:
    yield from _schedule_of("train", config.train, config)
    if config.algorithm.needs_critic:
        yield from _schedule_of("critic", config.critic, config)


def _schedule_of(section: str, optimizer: OptimizerConfig, config: Config) -> Iterator[Problem]:
    if optimizer.min_lr > optimizer.lr:
        yield Problem(f"{section}.min_lr", f"{optimizer.min_lr} is above {section}.lr {optimizer.lr}")
    if config.loop.num_rollout is None:
        return  # as long as nobody has counted
    steps, warmup = total_steps(config), optimizer.lr_warmup_steps
    if steps and warmup >= steps:
        yield Problem(
            f"{section}.lr_warmup_steps",
            f"{warmup} steps of warm-up, but the run has {steps} (num_rollout {config.loop.num_rollout} "
            f"x {steps_per_rollout(config)} steps per rollout); use at most {steps - 1}",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation.interval is None:
        if evaluation.data is not None:
            yield Problem(
                "eval.interval", "eval.data is set, but there is no evaluation; set this, or leave out eval.data"
            )
        return
    if evaluation.data is None:
        yield Problem("eval.data", "needed with eval.interval: give eval.data.path or eval.data.generator")
    else:
        yield from data.source("eval.data", evaluation.data, needed=True)
    if evaluation.reward is not None and evaluation.reward.name is None:
        yield Problem("eval.reward.name", "the section is there without a name; set it, or leave out eval.reward")
    if evaluation.reward is None and config.reward.name is None:
        yield Problem("eval.reward.name", "evaluation needs a reward: set this or reward.name")


def _checkpoint(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.keep is not None and checkpoint.save_interval is None:
        yield Problem("checkpoint.keep", "is set, but nothing is saved; set checkpoint.save_interval")
    if checkpoint.async_save and checkpoint.save_interval is None:
        yield Problem("checkpoint.async_save", "is set, but nothing is saved; set checkpoint.save_interval")
    directory = checkpoint.load or checkpoint.save or checkpoint.save_interval
    if checkpoint.ckpt_step is not None and not directory:
        yield Problem("checkpoint.ckpt_step", "is an iteration of checkpoint.load, which is not set (nor is save)")
    for option, value in (("load", checkpoint.load), ("save", checkpoint.save)):
        if value == "":
            yield Problem(f"checkpoint.{option}", "is empty; give a directory or leave it out")


def _names(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    generators = [("data.generator", config.data.generator)]
    rewards = [("reward.name", config.reward.name)]
    if evaluation.data is not None:
        generators.append(("eval.data.generator", evaluation.data.generator))
    if evaluation.reward is not None:
        rewards.append(("eval.reward.name", evaluation.reward.name))
    for given, registered in ((generators, tuple(GENERATORS)), (rewards, tuple(REWARDS))):
        for key, name in given:
            if name is None or name in registered or is_import_path(name):
                continue
            yield Problem(
                key, f"no {name!r} is registered{did_you_mean(name, registered)} (or package.module:function)"
            )
    rollout_filter = config.rollout.filter
    if rollout_filter is not None and rollout_filter not in FILTERS and not is_import_path(rollout_filter):
        near = did_you_mean(rollout_filter, tuple(FILTERS))
        yield Problem("rollout.filter", f"no {rollout_filter!r} is registered{near} (or package.module:function)")
    generate = config.rollout.generate
    if generate is not None and not is_import_path(generate):
        yield Problem("rollout.generate", f"{generate!r} is not an import path; expected package.module:function")
    for key, hook in (
        ("train.setup_hook", config.train.setup_hook),
        ("rollout.setup_hook", config.rollout.setup_hook),
    ):
        if hook is not None and not is_import_path(hook):
            yield Problem(key, f"{hook!r} is not an import path; expected package.module:function")
