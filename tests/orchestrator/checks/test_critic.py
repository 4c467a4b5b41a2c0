"""Two roles in one configuration: nothing of one reaches the other, and what cannot be right is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.checks.configuration import problems
from orchestrator.config import Config
from orchestrator.resume import resuming
from orchestrator.running.gang_specs import critic_specs, worker_specs
from orchestrator.running.run_dir import config_text
from state.gang import GangId
from state.slots import Slot
from tests.orchestrator.valid_config import with_flags
from workers.config import CriticConfig, TrainConfig

PPO = ("--algorithm.advantage_estimator", "ppo")
GANG = GangId(2, 1, "c0ffee")


def of_each(config: Config) -> tuple[list[Any], list[Any]]:
    told = (config, resuming.plan(config), GANG, "run", None)
    return worker_specs(*told), critic_specs(*told)


def test_each_role_is_told_its_own_and_the_configuration_is_as_it_was(tmp_path: Path) -> None:
    shared = sorted(CriticConfig.model_fields.keys() & TrainConfig.model_fields.keys())
    numbers = {"lr": "0.5", "min_lr": "0.25", "lr_warmup_steps": "3", "weight_decay": "0.125", "adam_beta1": "0.75"}
    numbers |= {"adam_beta2": "0.625", "adam_eps": "0.0625", "clip_grad": "7.0", "lr_decay_style": "linear"}
    assert sorted(numbers) == shared
    flags = [part for name, value in numbers.items() for part in (f"--critic.{name}", value)]
    config = with_flags(
        tmp_path, *PPO, *flags, "--critic.value_clip", "0.3", "--train.num_workers", "2",
        "--train.lr_warmup_steps", "1", "--train.lr_decay_style", "cosine", "--algorithm.kl_coef", "0.1",
    )  # fmt: skip
    before = config_text(config)
    actors, critics = of_each(config)
    assert config_text(config) == before
    assert [spec.worker.rank for spec in actors] == [spec.worker.rank for spec in critics] == [0, 1]
    for actor, critic in zip(actors, critics, strict=True):
        assert (actor.worker.role, critic.worker.role) == ("actor", "critic")
        assert actor.train == config.train
        assert {name: getattr(critic.train, name) for name in shared} == {
            name: getattr(config.critic, name) for name in shared
        }
        assert all(getattr(critic.train, name) != getattr(actor.train, name) for name in shared)
        rest = TrainConfig.model_fields.keys() - set(shared)
        assert {name: getattr(critic.train, name) for name in rest} == {n: getattr(actor.train, n) for n in rest}
        assert [slot.slot for slot in actor.slots] == [Slot.ACTOR, Slot.REF]
        assert [slot.slot for slot in critic.slots] == [Slot.CRITIC]
        assert (actor.value_clip, critic.value_clip) == (None, 0.3)
        assert (critic.keep_old_actors, critic.ref_update_interval) == (0, None)


def test_a_critic_is_saved_beside_the_actor_unless_told_where(tmp_path: Path) -> None:
    saves = ("--checkpoint.save_interval", "1")
    in_run = with_flags(tmp_path, *PPO, *saves)
    root = resuming.save_root(in_run)
    assert resuming.critic_save_root(in_run) == Path(f"{root}-critic")
    slashed = with_flags(tmp_path, *PPO, *saves, "--checkpoint.save", f"{tmp_path}/ckpt/")
    assert resuming.critic_save_root(slashed) == tmp_path / "ckpt-critic"
    told = with_flags(tmp_path, *PPO, *saves, "--critic.save", str(tmp_path / "values"))
    assert resuming.critic_save_root(told) == tmp_path / "values"
    assert resuming.critic_save_root(with_flags(tmp_path, *saves)) is None
    assert resuming.critic_save_root(with_flags(tmp_path, *PPO)) is None


SAVES = ("--checkpoint.save_interval", "1", "--checkpoint.save", "here")


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (("--critic.lr", "0.1"), "critic.lr", "grpo has no critic; set that to ppo"),
        (("--critic.load", "x"), "critic.load", "set that to ppo"),
        (("--critic.value_clip", "0.1"), "critic.value_clip", "set that to ppo"),
        (("--algorithm.gamma", "0.9"), "algorithm.gamma", "set that to ppo"),
        (("--algorithm.gae_lambda", "0.9"), "algorithm.gae_lambda", "set that to ppo"),
        (("--algorithm.normalize_advantages",), "algorithm.normalize_advantages", "set that to ppo"),
        ((*PPO, "--critic.min_lr", "1.0"), "critic.min_lr", "is above critic.lr"),
        ((*PPO, "--critic.lr_warmup_steps", "99"), "critic.lr_warmup_steps", "use at most"),
        ((*PPO, "--critic.ckpt_step", "1"), "critic.ckpt_step", "critic.load, which is not set"),
        ((*PPO, "--critic.save", "x"), "critic.save", "nothing is saved"),
        ((*PPO, *SAVES, "--critic.save", "./here/"), "critic.save", "here, where this run saves checkpoints"),
        ((*PPO, *SAVES, "--critic.save", "here/values"), "critic.save", "here, where this run saves checkpoints"),
        (
            (*PPO, *SAVES, "--debug.save_rollouts", "here-critic/r"),
            "debug.save_rollouts",
            "here-critic, where this run",
        ),
        ((*PPO, *SAVES, "--checkpoint.load", "old", "--critic.save", "old"), "critic.save", "is checkpoint.load too"),
        ((*PPO, *SAVES, "--checkpoint.load", "here-critic"), "checkpoint.load", "where this run saves its critic"),
        ((*PPO, *SAVES, "--critic.save", ""), "critic.save", "is empty"),
    ],
)
def test_what_cannot_be_right_is_refused_with_what_would_work(
    tmp_path: Path, flags: tuple[str, ...], key: str, words: str
) -> None:
    found = [str(problem) for problem in problems(with_flags(tmp_path, *flags))]
    assert len(found) == 1
    assert found[0].startswith(key)
    assert words in found[0]


@pytest.mark.parametrize(
    "flags",
    [
        PPO,
        (*PPO, "--rollout.n_samples_per_prompt", "1"),
        (*PPO, "--algorithm.gamma", "0.9", "--algorithm.normalize_advantages", "--critic.lr", "0.1", *SAVES),
        (*PPO, "--loop.mode", "async", "--algorithm.old_logprobs", "engine"),
    ],
)
def test_what_can_be_is_not(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert problems(with_flags(tmp_path, *flags)) == ()
