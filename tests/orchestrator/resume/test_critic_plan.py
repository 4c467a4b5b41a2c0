"""What a critic starts from, beside each thing that an actor can start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import Config
from orchestrator.resume import resuming
from orchestrator.resume.continuity import expected
from state import checkpoints, saves
from state.errors import ResumeError
from state.resume import CriticLoad, LoadSpec
from tests.orchestrator.resume.stored import DATA, of_megatron, saved
from tests.orchestrator.valid_config import with_flags

PPO = ("--algorithm.advantage_estimator", "ppo")


def config(root: Path, *flags: str) -> Config:
    where = ("--checkpoint.save", str(root / "ckpt"), "--checkpoint.save_interval", "1")
    return with_flags(root, *PPO, *where, *flags)


def of_critic(path: Path, iteration: int, *, optimizer: bool = True) -> CriticLoad:
    return CriticLoad(LoadSpec(str(path), iteration, "native"), load_optimizer=optimizer, fresh_head=False)


def test_a_fresh_critic_begins_with_what_the_actor_does(tmp_path: Path) -> None:
    plan = resuming.plan(config(tmp_path))
    assert plan.critic == CriticLoad(plan.load, load_optimizer=False, fresh_head=True)
    assert plan.to_json()["critic"] == {"path": None, "iteration": None, "load_optimizer": False, "fresh_head": True}


def test_other_estimators_have_none(tmp_path: Path) -> None:
    plan = resuming.plan(with_flags(tmp_path))
    assert plan.critic is None
    assert "critic" not in plan.to_json()


def test_both_continue_from_the_newest_and_a_critic_that_is_ahead_waits(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0, 1, 2)
    plan = resuming.plan(asked)
    assert (plan.start_rollout_id, plan.warnings) == (2, ())
    assert plan.critic == of_critic(tmp_path / "ckpt-critic", 1)
    assert expected(asked, plan).keys() == {"actor", "critic"}


def test_without_the_critics_newest_both_go_back_and_the_warning_names_both(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0)
    plan = resuming.plan(asked)
    assert (plan.load.iteration, plan.start_rollout_id, plan.load_data) == (0, 1, True)
    assert plan.critic == of_critic(tmp_path / "ckpt-critic", 0)
    assert "iteration 0 is the newest that actor and critic both have" in plan.reason
    assert "the actor's newest" in plan.warnings[0]
    assert "the critic's newest" in plan.warnings[0]
    for strict in (("--checkpoint.resume", "must"), ("--checkpoint.ckpt_step", "1")):
        with pytest.raises(ResumeError, match=r"actor's newest .* iteration 1, the critic's newest .* iteration 0"):
            resuming.plan(config(tmp_path, *strict))
    assert resuming.plan(config(tmp_path, "--checkpoint.ckpt_step", "0")).critic == plan.critic


def test_a_critics_checkpoint_says_what_it_is_or_is_accepted_as_it_is(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0)
    saves.begin(tmp_path / "ckpt-critic", 0)
    saves.commit(tmp_path / "ckpt-critic", 0, {"role": "critic", "incarnation": 1}, None)
    with pytest.raises(ResumeError, match=r"ckpt-critic/iter_0000000/slotwise.json does not say which model"):
        resuming.plan(asked)
    accepted = resuming.plan(config(tmp_path, "--checkpoint.allow_mismatch", "model", "continuity"))
    assert accepted.critic == of_critic(tmp_path / "ckpt-critic", 0)
    assert [("ckpt-critic" in warning) for warning in accepted.warnings] == [True, True]


def test_an_actor_that_has_trained_without_a_critic_is_not_joined_by_a_fresh_one(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1, critic=None)
    with pytest.raises(ResumeError, match=r"no iteration in common: .* \(iteration 1 was saved without a critic\)"):
        resuming.plan(asked)


def test_a_run_that_begins_with_another_runs_checkpoints_takes_its_critic_too(tmp_path: Path) -> None:
    asked = config(tmp_path, "--checkpoint.load", str(tmp_path / "old"))
    saved(tmp_path / "old", asked, "actor", 4)
    saved(tmp_path / "old-critic", asked, "critic", 4)
    saved(tmp_path / "elsewhere", asked, "critic", 4)
    assert resuming.plan(asked).critic == of_critic(tmp_path / "old-critic", 4)
    named = ("--checkpoint.load", str(tmp_path / "old"), "--critic.load", str(tmp_path / "elsewhere"))
    assert resuming.plan(config(tmp_path, *named)).critic == of_critic(tmp_path / "elsewhere", 4)
    with pytest.raises(ResumeError, match=r"critic\.ckpt_step asks for iteration 2"):
        resuming.plan(config(tmp_path, *named, "--critic.ckpt_step", "2"))
    # Once it has saved, that is where either continues.
    saved(tmp_path / "ckpt", asked, "actor", 5)
    saved(tmp_path / "ckpt-critic", asked, "critic", 5)
    plan = resuming.plan(config(tmp_path, *named))
    assert plan.critic == of_critic(tmp_path / "ckpt-critic", 5)
    assert "checkpoint.load is for its first start" in plan.reason
    assert "critic.load is for its first start" in plan.reason


def test_weights_alone_are_taken_of_both(tmp_path: Path) -> None:
    old = ("--checkpoint.weights_only", "--checkpoint.load", str(tmp_path / "old"))
    asked = config(tmp_path, *old)
    saved(tmp_path / "old", asked, "actor", 3, critic=None)
    fresh = resuming.plan(asked)
    assert fresh.critic == CriticLoad(fresh.load, load_optimizer=False, fresh_head=True)
    saved(tmp_path / "old", asked, "actor", 4)
    with pytest.raises(
        ResumeError, match=rf"critic that was saved with iteration 4 .* critic\.load {tmp_path}/old for"
    ):
        resuming.plan(asked)
    anew = resuming.plan(config(tmp_path, *old, "--critic.load", str(tmp_path / "old"))).critic
    assert anew == CriticLoad(LoadSpec(str(tmp_path / "old"), 4, "native"), load_optimizer=False, fresh_head=True)
    saved(tmp_path / "old-critic", asked, "critic", 4)
    assert resuming.plan(asked).critic == of_critic(tmp_path / "old-critic", 4, optimizer=False)


def test_the_critics_own_load_and_step_never_apply_to_the_actor_nor_the_reverse(tmp_path: Path) -> None:
    saved(tmp_path / "pretrained", config(tmp_path), "critic", 6, 7)
    given = ("--critic.load", str(tmp_path / "pretrained"), "--critic.ckpt_step", "6")
    plan = resuming.plan(config(tmp_path, *given))
    assert (plan.source, plan.load, plan.start_rollout_id) == ("fresh", LoadSpec.random(), 0)
    assert plan.critic == of_critic(tmp_path / "pretrained", 6, optimizer=False)
    policy = config(tmp_path, "--critic.load", str(tmp_path / "policy"))
    saved(tmp_path / "policy", policy, "actor", 3)
    found = resuming.plan(policy).critic
    assert found == CriticLoad(LoadSpec(str(tmp_path / "policy"), 3, "native"), load_optimizer=False, fresh_head=True)


@pytest.mark.parametrize("option", ["--checkpoint.load", "--ref.load"])
def test_a_critics_checkpoint_is_never_an_actors(tmp_path: Path, option: str) -> None:
    asked = config(tmp_path, "--algorithm.kl_coef", "0.1", option, str(tmp_path / "critic"))
    saved(tmp_path / "critic", asked, "critic", 3)
    saves.write_data(checkpoints.iteration_dir(tmp_path / "critic", 3), DATA)
    with pytest.raises(ResumeError, match=f"{option[2:]}: .* is of a critic"):
        (resuming.plan if option == "--checkpoint.load" else resuming.plan_ref)(asked)


def test_swapped_directories_are_told_apart_before_anything_else_is_asked_of_them(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "run", asked, "actor", 0)
    saved(tmp_path / "run-critic", asked, "critic", 0)
    swapped = ("--checkpoint.load", str(tmp_path / "run-critic"), "--critic.load", str(tmp_path / "run"))
    with pytest.raises(ResumeError, match=r"checkpoint\.load: iteration 0 of .* is of a critic"):
        resuming.plan(config(tmp_path, *swapped))
    twice = ("--checkpoint.load", str(tmp_path / "run"), "--critic.load", str(tmp_path / "run"))
    with pytest.raises(
        ResumeError, match=r"critic\.load: .*run holds an actor's iterations .* Leave it out .*run-critic"
    ):
        resuming.plan(config(tmp_path, *twice))


@pytest.mark.parametrize("begins", ["fresh", "elsewhere"])
def test_a_critic_load_that_is_not_there_is_named(tmp_path: Path, begins: str) -> None:
    saved(tmp_path / "old", config(tmp_path), "actor", 4)
    load = () if begins == "fresh" else ("--checkpoint.load", str(tmp_path / "old"))
    with pytest.raises(ResumeError, match=r"critic\.load: .*/nope does not exist"):
        resuming.plan(config(tmp_path, *load, "--critic.load", str(tmp_path / "nope")))


def test_a_critic_that_is_not_whole_is_named_and_never_replaced_by_a_fresh_head_in_silence(tmp_path: Path) -> None:
    asked = config(tmp_path, "--checkpoint.load", str(tmp_path / "old"))
    saved(tmp_path / "old", asked, "actor", 4)
    saved(tmp_path / "old-critic", asked, "critic", 4)
    (tmp_path / "old-critic" / "iter_0000004" / checkpoints.MARKER).write_text("{")
    for flags in ((), ("--checkpoint.weights_only",)):
        with pytest.raises(
            ResumeError, match=r"old-critic.* iter_0000004 \(slotwise\.json is not JSON|old-critic is none"
        ):
            resuming.plan(config(tmp_path, "--checkpoint.load", str(tmp_path / "old"), *flags))


def test_no_iteration_is_advised_that_the_actor_cannot_continue_from(tmp_path: Path) -> None:
    asked = config(tmp_path, "--checkpoint.resume", "must")
    saved(tmp_path / "ckpt", asked, "actor", 0, 1, 2)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0, 1)
    (tmp_path / "ckpt" / "iter_0000001" / checkpoints.DATA).unlink()
    with pytest.raises(ResumeError, match=r"name it with checkpoint\.ckpt_step 0"):
        resuming.plan(asked)


def test_the_critic_of_another_run_is_no_partner_however_its_iterations_are_numbered(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0)
    saved(tmp_path / "ckpt-critic", asked, "critic", 1, critic="another")
    plan = resuming.plan(asked)
    assert plan.critic == of_critic(tmp_path / "ckpt-critic", 0)
    assert "iteration 1 of the critic is not the one that was saved with the actor's" in plan.warnings[0]
    with pytest.raises(ResumeError, match="is not the one that was saved with the actor's"):
        resuming.plan(config(tmp_path, "--checkpoint.resume", "must"))


def test_nothing_is_saved_over_the_critic_of_another_run(tmp_path: Path) -> None:
    saved(tmp_path / "old", config(tmp_path), "actor", 0, 1)
    saved(tmp_path / "old-critic", config(tmp_path), "critic", 0, 1)
    onto = ("--critic.save", str(tmp_path / "old-critic"))
    for begins in ((), ("--checkpoint.load", str(tmp_path / "old"))):
        with pytest.raises(
            ResumeError,
            match=rf"iteration 0 of the critic that was saved with the actor in {tmp_path}/old \(and 1 more",
        ):
            resuming.plan(config(tmp_path, *begins, *onto))


def test_a_run_that_was_moved_with_its_critic_continues(tmp_path: Path) -> None:
    saved(tmp_path / "old", config(tmp_path), "actor", 0, 1)
    saved(tmp_path / "old-critic", config(tmp_path), "critic", 0, 1, 2)
    (tmp_path / "old").rename(tmp_path / "ckpt")
    (tmp_path / "old-critic").rename(tmp_path / "ckpt-critic")
    assert resuming.plan(config(tmp_path)).critic == of_critic(tmp_path / "ckpt-critic", 1)


def test_iterations_that_are_asked_for_by_number_are_kept(tmp_path: Path) -> None:
    given = ("--critic.load", str(tmp_path / "ckpt-critic"), "--critic.ckpt_step", "1")
    assert resuming.protected(config(tmp_path, *given)) == (1,)


def test_nothing_is_saved_over_what_is_not_a_critics(tmp_path: Path) -> None:
    there = tmp_path / "there"
    asked = config(tmp_path, "--critic.save", str(there))

    there.write_text("a file")
    with pytest.raises(ResumeError, match=f"{there} cannot be read as a checkpoint directory"):
        resuming.plan(asked)
    there.unlink()

    saved(there, asked, "actor", 0, 1)
    with pytest.raises(ResumeError, match=r"there holds iteration 0, which is of an actor \(and 1 more"):
        resuming.plan(asked)

    others = tmp_path / "others"
    others.mkdir()
    (others / "notes.txt").touch()
    with pytest.raises(ResumeError, match=r"notes\.txt, which is no checkpoint of ours"):
        resuming.plan(config(tmp_path, "--critic.save", str(others)))

    (tmp_path / "ckpt").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    with pytest.raises(ResumeError, match="both are one directory"):
        resuming.plan(config(tmp_path, "--critic.save", str(tmp_path / "link")))


def test_a_critic_that_was_saved_before_its_actor_does_not_keep_the_run_from_beginning_again(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0)
    plan = resuming.plan(asked)
    assert plan.start_rollout_id == 0
    assert any("ckpt-critic holds a critic's iterations up to 0" in warning for warning in plan.warnings)


def test_a_critic_of_another_model_is_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0)
    other = asked.model_copy(
        update={"model": asked.model.model_copy(update={"config": {**(asked.model.config or {}), "hidden_size": 96}})}
    )
    saved(tmp_path / "ckpt-critic", other, "critic", 0)
    with pytest.raises(ResumeError, match="ckpt-critic/iter_0000000 was saved by a run with another model"):
        resuming.plan(asked)
    accepted = resuming.plan(config(tmp_path, "--checkpoint.allow_mismatch", "model"))
    assert any("ckpt-critic" in warning and "another model" in warning for warning in accepted.warnings)


def test_what_megatron_wrote_names_no_critic_and_has_one_only_where_that_is_said(tmp_path: Path) -> None:
    of_megatron(tmp_path / "old", 3)
    begins = ("--checkpoint.load", str(tmp_path / "old"))
    saved(tmp_path / "old-critic", config(tmp_path), "critic", 3)
    with pytest.raises(ResumeError, match=r"iteration 3 is Megatron's own, which names no critic.* critic\.load"):
        resuming.plan(config(tmp_path, *begins))
    said = resuming.plan(config(tmp_path, *begins, "--critic.load", str(tmp_path / "old-critic")))
    assert said.critic == of_critic(tmp_path / "old-critic", 3)


@pytest.mark.parametrize("left", [checkpoints.DATA, checkpoints.PROBE])
def test_an_actor_that_lost_its_marker_is_no_partner_of_any_critic(tmp_path: Path, left: str) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0)
    saved(tmp_path / "ckpt-critic", asked, "critic", 1, critic="another")
    newest = tmp_path / "ckpt" / "iter_0000001"
    for name in (checkpoints.MARKER, checkpoints.DATA):
        (newest / name).unlink()
    (newest / "metadata.json").write_text("{}")
    (newest / left).write_text("{}")
    plan = resuming.plan(asked)
    assert plan.critic == of_critic(tmp_path / "ckpt-critic", 0)
    assert f"which is not whole (slotwise.json is missing beside {left})" in plan.warnings[0]


def test_a_step_of_the_critic_alone_is_refused_where_it_continues_with_its_actor(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0, 1)
    own = ("--critic.load", str(tmp_path / "ckpt-critic"), "--critic.ckpt_step", "0")
    with pytest.raises(ResumeError, match=r"critic\.ckpt_step asks for iteration 0 of .*ckpt-critic"):
        resuming.plan(config(tmp_path, *own))


def test_a_critic_that_gives_weights_alone_is_of_the_same_model_too(tmp_path: Path) -> None:
    asked = config(tmp_path)
    other = asked.model_copy(
        update={"model": asked.model.model_copy(update={"config": {**(asked.model.config or {}), "hidden_size": 96}})}
    )
    saved(tmp_path / "pretrained", other, "critic", 6)
    with pytest.raises(ResumeError, match="pretrained/iter_0000006 was saved by a run with another model"):
        resuming.plan(config(tmp_path, "--critic.load", str(tmp_path / "pretrained")))


def test_a_critic_beside_converted_weights_is_told_to_be_left(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0, 1)
    saves.begin_release(tmp_path / "ckpt")
    saves.commit_release(tmp_path / "ckpt", {"digest": "d", "dtype": "float32"})
    plan = resuming.plan(asked)
    assert (plan.source, plan.start_rollout_id) == ("release", 0)
    assert any("ckpt-critic holds a critic's iterations up to 1" in warning for warning in plan.warnings)


def test_a_file_beside_the_critics_own_saves_does_no_harm(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0)
    (tmp_path / "ckpt-critic" / "README").touch()
    assert resuming.plan(asked).critic == of_critic(tmp_path / "ckpt-critic", 0)
    (tmp_path / "ckpt-critic" / "iter_0000007").write_text("a file")
    with pytest.raises(ResumeError, match="iter_0000007, which is no checkpoint of ours"):
        resuming.plan(asked)


def test_whichever_way_leads_there_a_directory_is_the_same(tmp_path: Path) -> None:
    asked = config(tmp_path)
    saved(tmp_path / "ckpt", asked, "actor", 0, 1)
    saved(tmp_path / "ckpt-critic", asked, "critic", 0, 1)
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    for same in (tmp_path / "link", tmp_path / "ckpt-critic" / ".." / "ckpt"):
        back = ("--checkpoint.load", str(same), "--checkpoint.ckpt_step", "0")
        assert resuming.plan(config(tmp_path, *back)).critic == of_critic(tmp_path / "ckpt-critic", 0)
        with pytest.raises(ResumeError, match="this run would save over what is there"):
            resuming.plan(config(tmp_path, *back, "--checkpoint.weights_only"))
