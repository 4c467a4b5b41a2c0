"""What a run must not save over, and would come to, is said before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import Config
from orchestrator.resume import resuming
from state.errors import ResumeError
from tests.orchestrator.resume.stored import of_megatron, saved
from tests.orchestrator.valid_config import with_flags


def config(root: Path, *flags: str) -> Config:
    return with_flags(root, "--checkpoint.save", str(root / "ckpt"), "--checkpoint.save_interval", "1", *flags)


@pytest.mark.parametrize("more", [(), ("--checkpoint.weights_only",)])
def test_an_actor_is_not_saved_over_a_critic(tmp_path: Path, more: tuple[str, ...]) -> None:
    saved(tmp_path / "old", config(tmp_path), "actor", 2)
    saved(tmp_path / "ckpt", config(tmp_path), "critic", 0)
    begins = ("--checkpoint.load", str(tmp_path / "old"), "--checkpoint.ckpt_step", "2")
    with pytest.raises(ResumeError, match=r"checkpoint\.save: .*ckpt holds iteration 0, which is of a critic"):
        resuming.plan(config(tmp_path, *begins, *more))


def test_a_strange_iteration_that_the_run_would_come_to_is_told_now_and_one_behind_it_is_left(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", config(tmp_path), "actor", 2)
    behind, ahead = tmp_path / "ckpt" / "iter_0000001", tmp_path / "ckpt" / "iter_0000003"
    behind.write_text("a file")
    assert resuming.plan(config(tmp_path)).start_rollout_id == 3
    ahead.write_text("a file")
    with pytest.raises(ResumeError, match=r"ckpt holds iter_0000003, which is no checkpoint of ours"):
        resuming.plan(config(tmp_path))


def test_megatrons_own_iterations_are_continued_from_and_never_replaced(tmp_path: Path) -> None:
    for iteration in (3, 4):
        of_megatron(tmp_path / "ckpt", iteration)
    assert resuming.plan(config(tmp_path)).start_rollout_id == 5
    with pytest.raises(ResumeError, match="holds iteration 4, which is Megatron's own"):
        resuming.plan(config(tmp_path, "--checkpoint.ckpt_step", "3"))


def test_weights_alone_of_nothing_are_refused(tmp_path: Path) -> None:
    asked = ("--checkpoint.weights_only", "--checkpoint.load", str(tmp_path / "nope"))
    with pytest.raises(ResumeError, match=r"begins with weights, and .*/nope \(checkpoint\.load\) has none"):
        resuming.plan(config(tmp_path, *asked))


def test_where_a_run_began_is_not_read_any_more_once_it_has_saved(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", config(tmp_path), "actor", 2)
    (tmp_path / "old").write_text("a file")
    assert resuming.plan(config(tmp_path, "--checkpoint.load", str(tmp_path / "old"))).start_rollout_id == 3
