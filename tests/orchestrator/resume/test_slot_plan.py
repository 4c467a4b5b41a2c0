"""What each slot is filled from: what a checkpoint holds beside the actor, or what the configuration says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.resume import resuming
from orchestrator.resume.slot_plan import auxiliary
from orchestrator.rewards.scoring import Judged
from orchestrator.rollouts.buffer import Rollout, RolloutBuffer
from orchestrator.rollouts.group_work import Group
from orchestrator.rollouts.stream_state import Begun, Finished, StreamState
from state import checkpoints, saves
from state.errors import ResumeError
from state.slots import WeightId
from tests.orchestrator.saved_checkpoint import CURSOR, marker
from tests.orchestrator.valid_config import with_flags
from workers.batch import Prompt, Sample

REFRESHED = ("--ref.update_interval", "2")
OLD_ACTOR = ("--algorithm.old_logprobs", "old_actor", "--loop.mode", "async")


def saved(root: Path, iteration: int, slots: list[tuple[str, int]], waiting: tuple[int, ...] = ()) -> None:
    """A checkpoint with these slots and, waiting, a sample of each of these versions."""
    buffer = RolloutBuffer(CURSOR)
    for index, version in enumerate(waiting):
        sample = Sample(0, index, (1,), (2,), (-0.5,), (1,), (WeightId(1, version),), 0, "stop", 1.0)
        buffer.add(Rollout(iteration + 1 + index, (sample,), CURSOR))
    directory = saves.begin(root, iteration)
    saves.write_data(directory, buffer.state())
    held = [{"slot": slot, "version": version, "digest": "d"} for slot, version in slots]
    saves.commit(root, iteration, marker(with_flags(root.parent)) | {"slots": held}, None)


def planned(tmp_path: Path, *flags: str) -> dict[str, tuple[str, int | None, str | None]]:
    config = with_flags(tmp_path, "--checkpoint.load", str(tmp_path / "ckpt"), *flags)
    loads = auxiliary(config, resuming.plan(config))
    return {f"{one}@{one.version}" if "@" not in str(one) else str(one): facts(one.load) for one in loads}


def facts(load: Any) -> tuple[str, int | None, str | None]:
    about = asdict(load)
    return about["kind"], about["iteration"], about["part"]


def test_a_refreshed_reference_comes_from_the_checkpoint_and_an_unchanged_one_from_the_configuration(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "ckpt", 4, [("ref", 4)])
    assert planned(tmp_path, *REFRESHED) == {"ref@4": ("native", 4, "slots/ref")}
    assert planned(tmp_path) == {"ref@0": ("random", None, None)}


def test_each_iteration_has_slots_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 1, [("ref", 2)])
    saved(tmp_path / "ckpt", 4, [("ref", 4)])
    assert planned(tmp_path, *REFRESHED, "--checkpoint.ckpt_step", "1") == {"ref@2": ("native", 1, "slots/ref")}


def test_a_checkpoint_from_before_the_reference_was_refreshed_leaves_the_configured_one(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [])
    assert planned(tmp_path, *REFRESHED) == {"ref@0": ("random", None, None)}


def test_a_reference_that_is_refreshed_no_longer_or_only_from_now_on_is_a_warning(tmp_path: Path) -> None:
    def said(*flags: str) -> str:
        return " ".join(
            resuming.plan(with_flags(tmp_path, "--checkpoint.load", str(tmp_path / "ckpt"), *flags)).warnings
        )

    saved(tmp_path / "ckpt", 4, [("ref", 4)])
    assert said(*REFRESHED) == ""
    assert "ref@4; ref.update_interval is not set any more" in said()
    assert "ref@4; no KL term is on any more" in said(
        "--algorithm.use_kl_loss", "false", "--algorithm.kl_loss_coef", "0"
    )
    assert said("--checkpoint.weights_only", "true") == ""
    saved(tmp_path / "ckpt", 5, [("ref", 0)])  # was to be refreshed, and had not been
    assert said() == ""
    saved(tmp_path / "ckpt", 6, [("old_actor", 7)])
    assert "iter_0000006 was saved by a run that did not refresh its reference" in said(*REFRESHED)
    assert said() == ""


def test_weights_alone_begin_anew_with_the_configured_reference(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [("ref", 4), ("old_actor", 4)])
    flags = (*REFRESHED, *OLD_ACTOR, "--checkpoint.weights_only", "true")
    assert planned(tmp_path, *flags) == {"ref@0": ("random", None, None)}


def test_the_ring_comes_back_where_the_algorithm_needs_it(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [("old_actor", 3), ("old_actor", 4)], waiting=(4,))
    assert planned(tmp_path, *OLD_ACTOR) == {
        "ref@0": ("random", None, None),
        "old_actor@3": ("native", 4, "slots/old_actor-0000003"),
        "old_actor@4": ("native", 4, "slots/old_actor-0000004"),
    }
    engine = ("--algorithm.old_logprobs", "engine", "--loop.mode", "async")
    assert planned(tmp_path, *engine) == {"ref@0": ("random", None, None)}


def test_samples_that_wait_for_weights_which_were_not_saved_are_refused_at_start(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [("old_actor", 4)], waiting=(3, 4, 5))
    with pytest.raises(ResumeError, match=r"generated by version 3, but not .* as old_actor .* `engine`"):
        planned(tmp_path, *OLD_ACTOR)
    saved(tmp_path / "ckpt", 4, [("old_actor", 4)], waiting=(4, 5))  # 5 is what the actor itself is at
    assert set(planned(tmp_path, *OLD_ACTOR)) == {"ref@0", "old_actor@4"}


def wait_in_groups(root: Path, iteration: int, *versions: int) -> None:
    """In that checkpoint a finished group wrote itself with these versions, and a prompt was under way."""
    sample = Sample(0, 0, (1,), (2,), (-0.5,), (1,), tuple(WeightId(1, v) for v in versions), 0, "stop", 1.0)
    group = Group(Prompt(0, (1,), ""), (sample,), (Judged(1.0),), (), 0, False, 0.0)
    state = StreamState(CURSOR, (Finished(Begun(CURSOR), group),), (Begun(CURSOR | {"next_group_id": 1}),))
    saves.write_data(checkpoints.iteration_dir(root, iteration), state.to_json())


def test_groups_that_wait_need_the_same_loop_and_the_weights_that_generated_them(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [("old_actor", 3), ("old_actor", 4)])
    wait_in_groups(tmp_path / "ckpt", 4, 3)
    assert "old_actor@3" in planned(tmp_path, *OLD_ACTOR, "--loop.mode", "fully_async")
    for mode in ("async", "sync"):
        with pytest.raises(ResumeError, match=f"1 groups wait to be trained on and 1 were under way, .* `{mode}`"):
            planned(tmp_path, *OLD_ACTOR, "--loop.mode", mode)
    assert planned(tmp_path, "--checkpoint.weights_only", "true") == {"ref@0": ("random", None, None)}
    wait_in_groups(tmp_path / "ckpt", 4, 2)
    with pytest.raises(ResumeError, match=r"generated by version 2, but not .* as old_actor .* `engine`"):
        planned(tmp_path, *OLD_ACTOR, "--loop.mode", "fully_async")


def test_the_teacher_has_a_place_and_an_iteration_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", 4, [])
    saved(tmp_path / "school", 7, [])
    saved(tmp_path / "school", 9, [])
    opd = ("--algorithm.use_opd", "true", "--teacher.load", str(tmp_path / "school"))
    assert planned(tmp_path, *opd)["teacher@10"] == ("native", 9, None)
    assert planned(tmp_path, *opd, "--teacher.ckpt_step", "7", "--checkpoint.ckpt_step", "4")["teacher@8"][1] == 7
    with pytest.raises(ResumeError, match=r"teacher\.ckpt_step asks for iteration 4"):
        planned(tmp_path, *opd, "--teacher.ckpt_step", "4")


def test_a_dry_run_tells_where_every_slot_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from orchestrator.cli import main
    from tests.orchestrator.valid_config import write

    saved(tmp_path / "ckpt", 4, [("ref", 4), ("old_actor", 4)], waiting=(4,))
    flags = ("--checkpoint.load", str(tmp_path / "ckpt"), *REFRESHED, *OLD_ACTOR)
    assert main(["train", str(write(tmp_path)), *flags, "--dry-run", "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    assert set(loads) == {"actor", "ref", "old_actor@4"}
    assert loads["ref"]["part"] == "slots/ref"
    assert main(["train", str(write(tmp_path)), *flags, "--dry-run"]) == 0
    assert "# old_actor@4: slots/old_actor-0000004 of iteration 4" in capsys.readouterr().out
