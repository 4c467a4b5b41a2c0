"""Combinations of options that cannot be right, each refused under the key to change and with what would work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.batching import data_parallel_size, steps_per_rollout, total_steps
from orchestrator.checks import configuration, megatron_fields
from orchestrator.checks.surroundings import Surroundings
from orchestrator.checks.surroundings import problems as problems_here
from orchestrator.resume.resuming import protected
from tests.orchestrator.valid_config import said, with_flags

NO_CONFIG = ("--model.config", "null")
HF = (*NO_CONFIG, "--model.hf_checkpoint", "/hf")


def test_the_valid_configuration_has_no_problem(tmp_path: Path) -> None:
    assert said(tmp_path) == {}


REFUSED: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
    ("a step that does not divide the batch", ("--train.num_steps_per_rollout", "3"),
     "train.num_steps_per_rollout", ("8 x n_samples_per_prompt 4 = 32", "3 steps", "valid: 1, 2, 4, 8, 16")),
    ("a step smaller than the ranks", ("--train.num_steps_per_rollout", "32"),
     "train.num_steps_per_rollout", ("2 data-parallel ranks", "valid: 1, 2, 4, 8, 16")),
    ("a global batch larger than the rollout",
     ("--train.num_steps_per_rollout", "null", "--train.global_batch_size", "64"),
     "train.global_batch_size", ("= 32 samples", "valid: 2, 4, 8, 16, 32")),
    ("a global batch that the ranks do not divide",
     ("--train.num_steps_per_rollout", "null", "--train.global_batch_size", "1"),
     "train.global_batch_size", ("valid: 2, 4, 8, 16, 32",)),
    ("a batch that no step count fits", ("--rollout.rollout_batch_size", "1", "--rollout.n_samples_per_prompt", "3"),
     "rollout.rollout_batch_size", ("= 3 samples", "multiple of 2")),
    ("both ways to size a step", ("--train.global_batch_size", "16"), "train.global_batch_size", ("not both",)),
    ("workers that do not fill replicas", ("--train.num_workers", "3", "--train.tensor_model_parallel_size", "2"),
     "train.num_workers", ("2 x 1", "multiple of 2")),
    ("more tensor parallel ranks than heads divide",
     ("--train.num_workers", "4", "--train.tensor_model_parallel_size", "4"),
     "train.tensor_model_parallel_size", ("num_key_value_heads 2", "valid: 1, 2")),
    ("more stages than layers divide", ("--train.num_workers", "3", "--train.pipeline_model_parallel_size", "3"),
     "train.pipeline_model_parallel_size", ("num_hidden_layers 2", "valid: 1, 2")),
    ("KL loss without its weight", ("--algorithm.kl_loss_coef", "0"), "algorithm.kl_loss_coef", ("above 0",)),
    ("a KL weight without the loss", ("--no-algorithm.use_kl_loss",), "algorithm.use_kl_loss", ("unused",)),
    ("KL without weights for a reference", HF, "ref.load", ("slotwise convert /hf", "bridge")),
    ("KL as penalty without weights for a reference",
     (*HF, "--no-algorithm.use_kl_loss", "--algorithm.kl_loss_coef", "0", "--algorithm.kl_coef", "0.1"),
     "ref.load", ("no weights for the reference",)),
    ("a step of a reference that is not given", ("--ref.ckpt_step", "0"), "ref.ckpt_step", ("ref.load",)),
    ("a reference that moves with what is saved",
     ("--ref.load", "runs/test/../test/checkpoints", "--checkpoint.save_interval", "1"),
     "ref.load", ("ref.ckpt_step",)),
    ("greedy training", ("--rollout.temperature", "0"), "rollout.temperature", ("above 0",)),
    ("groups of one", ("--rollout.n_samples_per_prompt", "1"), "rollout.n_samples_per_prompt", ("at least 2",)),
    ("an asynchronous loop that does not choose", ("--loop.mode", "async"),
     "algorithm.old_logprobs", ("`engine`", "`recompute`")),
    ("an asynchronous loop that recomputes", ("--loop.mode", "async", "--algorithm.old_logprobs", "recompute"),
     "algorithm.old_logprobs", ("not the behaviour policy", "`engine`")),
    ("recomputing under weights that are published late", ("--loop.update_weights_interval", "2"),
     "algorithm.old_logprobs", ("interval of 1",)),
    ("a minimum above the learning rate", ("--train.min_lr", "1"), "train.min_lr", ("train.lr",)),
    ("a warm-up longer than the run", ("--train.lr_warmup_steps", "20"),
     "train.lr_warmup_steps", ("has 20", "num_rollout 10 x 2", "at most 19")),
    ("two sources of prompts", ("--data.path", "x.jsonl"), "data.generator", ("not both",)),
    ("no source of prompts", ("--data.generator", "null"), "data.path", ("data.generator",)),
    ("no reward", ("--reward.name", "null"), "reward.name", ("largest_digit",)),
    ("a misspelt generator", ("--data.generator", "largest_digits"),
     "data.generator", ("did you mean 'largest_digit'",)),
    ("a misspelt reward", ("--reward.name", "exact_mach"), "reward.name", ("did you mean 'exact_match'",)),
    ("half an import path", ("--reward.name", "my.module:"), "reward.name", ("package.module:function",)),
    ("a misspelt filter", ("--rollout.filter", "unequal_reward"),
     "rollout.filter", ("did you mean 'unequal_rewards'",)),
    ("a filter of unequal rewards in groups of one",
     ("--rollout.filter", "unequal_rewards", "--rollout.n_samples_per_prompt", "1"), "rollout.filter", ("above 1",)),
    ("a generate function that is no import path", ("--rollout.generate", "multi_turn"),
     "rollout.generate", ("package.module:function",)),
    ("a hook that is no import path", ("--train.setup_hook", "hook"), "train.setup_hook", ("package.module:function",)),
    ("an engine's hook, too", ("--rollout.setup_hook", "hook"), "rollout.setup_hook", ("package.module:function",)),
    ("evaluation without data", ("--eval.interval", "2"), "eval.data", ("eval.data.generator",)),
    ("evaluation data without evaluation", ("--eval.data.generator", "largest_digit"), "eval.interval", ("eval.data",)),
    ("evaluation with an unknown generator", ("--eval.interval", "2", "--eval.data.generator", "x"),
     "eval.data.generator", ("largest_digit",)),
    ("an empty evaluation reward",
     ("--eval.interval", "2", "--eval.data.generator", "largest_digit", "--eval.reward.timeout_s", "1"),
     "eval.reward.name", ("without a name",)),
    ("no model", NO_CONFIG, "model.hf_checkpoint", ("model.config",)),
    ("two models", ("--model.hf_checkpoint", "/hf"), "model.config", ("not both",)),
    ("an unknown kind of model", ("--model.config.model_type", "qwen9"),
     "model.config.model_type", ("qwen3_moe, qwen2, llama",)),
    ("a model without a tokenizer", ("--model.tokenizer", "null"), "model.tokenizer", ("model.config",)),
    ("keeping what is not saved", ("--checkpoint.keep", "2"), "checkpoint.keep", ("save_interval",)),
    ("asynchronous saves of nothing", ("--checkpoint.async_save",), "checkpoint.async_save", ("save_interval",)),
    ("a step of nothing, zero too", ("--checkpoint.ckpt_step", "0"), "checkpoint.ckpt_step", ("checkpoint.load",)),
    ("an empty path", ("--checkpoint.load", ""), "checkpoint.load", ("empty",)),
    ("a name that is no directory name", ("--run.name", "a/b"), "run.name", ("directory",)),
    ("a misspelt Megatron field", ("--train.megatron.recompute_granularit", "full"),
     "train.megatron.recompute_granularit", ("did you mean recompute_granularity?",)),
    ("a Megatron field that is an option", ("--train.megatron.lr", "1"), "train.megatron.lr", ("use train.lr",)),
    ("a Megatron field that the model decides", ("--train.megatron.num_layers", "1"),
     "train.megatron.num_layers", ("model.config",)),
    ("experts spread over ranks", ("--train.megatron.expert_model_parallel_size", "2"),
     "train.megatron.expert_model_parallel_size", ("only 1 is offered", "micro-batches")),
    ("a loss that balances experts", ("--train.megatron.moe_aux_loss_coeff", "0.1"),
     "train.megatron.moe_aux_loss_coeff", ("leave it out",)),
    ("a Megatron field that nobody may set", ("--train.megatron.use_cpu_initialization", "true"),
     "train.megatron.use_cpu_initialization", ("leave it out",)),
    ("a Megatron value of the wrong type", ("--train.megatron.recompute_num_layers", "x"),
     "train.megatron.recompute_num_layers", ("'x'", "int")),
    ("masters out of sight", ("--train.megatron.optimizer_cpu_offload", "true"),
     "train.megatron.optimizer_cpu_offload", ("leave it out",)),
    ("an overlapped gather of nothing",
     ("--train.megatron.overlap_param_gather", "true", "--no-train.use_distributed_optimizer"),
     "train.megatron.overlap_param_gather", ("use_distributed_optimizer",)),
    ("captured addresses of weights that move", ("--train.megatron.enable_cuda_graph", "true", "--ref.tier", "device"),
     "train.megatron.enable_cuda_graph", ("ref.tier copy",)),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "key", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(tmp_path: Path, flags: tuple[str, ...], key: str, words: tuple[str, ...]) -> None:
    found = said(tmp_path, *flags)
    assert key in found
    for word in words:
        assert word in found[key]


@pytest.mark.parametrize(
    "flags",
    [
        ("--loop.mode", "async", "--algorithm.old_logprobs", "engine", "--loop.update_weights_interval", "3"),
        ("--loop.update_weights_interval", "2", "--algorithm.old_logprobs", "engine"),
        (*HF, "--model.megatron_to_hf_mode", "bridge", "--model.tokenizer", "null"),
        (*HF, "--ref.load", "/ref", "--ref.ckpt_step", "0"),
        ("--loop.num_rollout", "0", "--rollout.temperature", "0", "--data.generator", "null", "--reward.name", "null"),
        ("--train.num_steps_per_rollout", "null", "--train.global_batch_size", "8"),
        ("--train.num_workers", "4", "--train.tensor_model_parallel_size", "2"),
        ("--eval.interval", "2", "--eval.data.generator", "largest_digit"),
        ("--rollout.filter", "mine:keep", "--rollout.generate", "mine.turns:play"),
        ("--reward.name", "my_rewards.math:judge", "--data.generator", "mine:rows", "--train.setup_hook", "a.b:c"),
        ("--checkpoint.save_interval", "2", "--checkpoint.keep", "1", "--checkpoint.ckpt_step", "0"),
        ("--train.megatron.attention_softmax_in_fp32", "true", "--train.megatron.recompute_num_layers", "null"),
        ("--train.lr_warmup_steps", "19"),
    ],
    ids=" ".join,
)
def test_accepted(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert said(tmp_path, *flags) == {}


def test_retention_leaves_what_the_same_command_asks_for_by_number(tmp_path: Path) -> None:
    saving = ("--checkpoint.save", "ckpt", "--checkpoint.save_interval", "1")
    ref = ("--ref.load", "ckpt", "--ref.ckpt_step", "0")
    step = ("--checkpoint.ckpt_step", "3")
    for flags, kept in [
        ((), ()),
        ((*saving, *ref), (0,)),
        ((*saving, *ref, *step), (0, 3)),
        ((*saving, *step, "--checkpoint.load", "elsewhere"), ()),
        (("--checkpoint.save", "ckpt", *ref), ()),
    ]:
        assert protected(with_flags(tmp_path, *flags)) == kept


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("prompts", [1, 2, 3, 6])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_a_batch_is_accepted_exactly_when_every_rank_gets_the_same_count(
    tmp_path: Path, workers: int, prompts: int, steps: int
) -> None:
    flags = ("--train.num_workers", str(workers), "--rollout.rollout_batch_size", str(prompts))
    config = with_flags(tmp_path, *flags, "--train.num_steps_per_rollout", str(steps))
    accepted = not any("rollout" in p.key for p in configuration.problems(config))
    assert accepted == (prompts * 4 % (steps * workers) == 0)
    if accepted:
        assert (data_parallel_size(config), steps_per_rollout(config)) == (workers, steps)
        assert total_steps(config) == 10 * steps


def test_megatron_fields_are_those_of_its_classes() -> None:
    import dataclasses

    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = megatron_fields.fields()
    assert known is not None
    assert set(known) == {f.name for c in (TransformerConfig, OptimizerConfig) for f in dataclasses.fields(c)}
    assert set(megatron_fields.DECIDED) - set(known) == set()


def test_decided_fields_cover_what_the_workers_decide() -> None:
    """Else a run would be refused only after Ray has started."""
    import torch

    from workers.config import TrainConfig
    from workers.megatron.optimizer import optimizer_config

    refused = []
    for key in megatron_fields.fields() or {}:
        try:
            optimizer_config(TrainConfig(megatron={key: None}), torch.float32)
        except ValueError as error:
            if f"{key} is decided" in str(error):
                refused.append(key)
        except Exception:
            continue  # None is not a value of this field, but it may be set
    assert refused
    assert set(refused) <= set(megatron_fields.DECIDED)


IN_A_JOB = Surroundings(in_ray_job=True, on_one_machine=False)


def test_in_a_ray_job_relative_runs_and_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    flags = ("--checkpoint.save", "ckpt", "--checkpoint.load", "../old", "--ref.load", "ref")
    critic = ("--critic.load", "old-critic", "--critic.save", "ckpt-critic")
    found = {p.key: p.message for p in problems_here(with_flags(tmp_path, *flags, *critic), IN_A_JOB)}
    named = {"run.dir", "checkpoint.save", "checkpoint.load", "ref.load", "critic.load", "critic.save"}
    assert set(found) == named
    assert all("deleted with the job" in message for message in found.values())
    flags = ("--run.dir", "/shared/run", "--checkpoint.save", "/shared/ckpt")
    assert problems_here(with_flags(tmp_path, *flags), IN_A_JOB) == ()


def test_a_ray_job_is_known_by_its_environment_or_its_working_directory() -> None:
    session = Path("/tmp/ray/session_x/runtime_resources/working_dir_files/_ray_pkg_1")
    assert Surroundings.of({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, Path("/"), None) == IN_A_JOB
    assert Surroundings.of({}, session, None) == IN_A_JOB
    assert Surroundings.of({}, Path("/home"), None) == Surroundings(False, True)
    assert not Surroundings.of({"RAY_ADDRESS": "h:6379"}, Path("/home"), None).on_one_machine
    assert not Surroundings.of({}, Path("/home"), "h:6379").on_one_machine


def test_files_that_one_machine_does_not_have_are_named(tmp_path: Path) -> None:
    one_machine = Surroundings(in_ray_job=False, on_one_machine=True)
    assert problems_here(with_flags(tmp_path), one_machine) == ()
    flags = ("--data.path", "absent.jsonl", "--model.tokenizer", "absent", "--model.hf_checkpoint", str(tmp_path))
    found = {p.key: p.message for p in problems_here(with_flags(tmp_path, *flags), one_machine)}
    assert set(found) == {"data.path", "model.tokenizer", "model.hf_checkpoint"}
    assert "looked in" in found["data.path"]
    elsewhere = Surroundings(in_ray_job=False, on_one_machine=False)
    assert problems_here(with_flags(tmp_path, *flags), elsewhere) == ()


def test_checking_needs_neither_torch_nor_ray() -> None:
    import subprocess

    code = (
        "import sys, orchestrator.cli, orchestrator.checks.megatron_fields as m; m.fields(); "
        "print([n for n in ('torch', 'ray', 'megatron.core', 'transformers') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_weights_travel_between_devices_of_one_kind(tmp_path: Path) -> None:
    assert "rollout.gpus_per_engine" in said(tmp_path, "--train.gpus_per_worker", "1")


def test_sharing_a_gpu_needs_shared_memory(tmp_path: Path) -> None:
    halves = ("--train.gpus_per_worker", "0.5", "--rollout.gpus_per_engine", "0.5")
    assert "nccl" in said(tmp_path, *halves)["weights.transport"]
    assert said(tmp_path, *halves, "--weights.transport", "ipc") == {}
