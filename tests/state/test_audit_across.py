"""The audit holds journals against each other: replicas, proofs of engines, behaviour policies, and what a start took
up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.state.journal_edits import drop, edit, entries, find, findings, found, update, write
from tests.state.toy_run import ToyRun, kept_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "run"
    kept_run(directory)
    return directory


def test_a_sound_run_has_no_findings(sound: Path) -> None:
    assert findings(sound) == []


# ---- what the gang agreed on ---------------------------------------------------------------------------------------


def test_a_quorum_about_what_a_rank_did_not_swear_to_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(live="f" * 16), kind="attested")
    found(run_dir, "swore to ffffffffffffffff")
    drop(run_dir, "actor-1", {"kind": "attested"})
    assert any("of actor/1, which at" in one and "swore to nothing" in one for one in findings(run_dir))


def test_a_quorum_about_another_slot_or_version_than_a_rank_held_is_found_even_where_it_was_refused(
    run_dir: Path,
) -> None:
    lines = entries(run_dir, "driver")
    publish = find(lines, publish_id="publish-1-2")
    refused = publish | {"publish_id": "publish-1-9", "outcome": "refused", "reason": "x", "engines": {}, "version": 1}
    write(run_dir, "driver", [*lines[: lines.index(publish)], refused, *lines[lines.index(publish) :]])
    said = findings(run_dir)
    assert sum("publish-1-9 was agreed on version 1" in one and "with version 2" in one for one in said) == 2


def test_replicas_that_drifted_apart_are_found_by_rank(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, split=1)
    run.begin()
    run.rollouts(2)
    run.finish()
    assert findings(tmp_path) == []
    publish = find(entries(tmp_path, "driver"), publish_id="publish-1-2")
    assert publish["replicas"] == [0, 0]
    edit(tmp_path, "driver", update(summaries=[publish["summaries"][0], "f" * 16]), publish_id="publish-1-2")
    found(tmp_path, "publish-1-2 was agreed on although actor/1 held ffffffffffffffff, its replica actor/0")


# ---- engines -------------------------------------------------------------------------------------------------------


def test_an_engine_that_serves_what_it_did_not_prove_is_found_whatever_the_driver_says(run_dir: Path) -> None:
    edit(run_dir, "fleet", update(digest="f" * 16), kind="proof", engine="engine-1", publish_id="publish-1-2")
    found(run_dir, "engine-1 serves 1.2 of publish-1-2, which published")
    found(run_dir, "it was found to hold ffffffffffffffff")
    drop(run_dir, "fleet", {"kind": "proof", "engine": "engine-0", "publish_id": "publish-1-1"})
    found(run_dir, "engine-0 serves 1.0 of publish-1-1")
    found(run_dir, "nothing was proven")


# ---- behaviour policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [[1], [3]])
def test_another_old_actor_than_the_one_that_generated_is_found(run_dir: Path, behaviour: list[int]) -> None:
    edit(run_dir, "driver", update(behaviour=behaviour), kind="trained", rollout_id=1)
    said = [one for one in findings(run_dir) if "I9" in one]
    took = f"took old_actor@0 for the policy that made rollout 1; it was {behaviour[0]}"
    assert sum(took in one for one in said) == 2


def test_a_behaviour_policy_that_nobody_computed_with_is_found(run_dir: Path) -> None:
    edit(run_dir, "driver", update(behaviour=[0, 2]), kind="trained", rollout_id=1)
    found(run_dir, "none of actor/0, actor/1 took old_actor@2 for the policy that made rollout 1, and it was that")


def test_without_a_rank_to_ask_its_journal_is_what_is_missing(run_dir: Path) -> None:
    for journal in (run_dir / "journal").glob("actor-*.jsonl"):
        journal.unlink()
    said = findings(run_dir)
    assert any("no journal" in one for one in said)
    assert not any("took old_actor" in one for one in said)


# ---- starts --------------------------------------------------------------------------------------------------------


def resumed(run_dir: Path, **changes: Any) -> None:
    lines = entries(run_dir, "driver")
    find(lines, kind="gang_started", incarnation=2)["resume"].update(changes)
    write(run_dir, "driver", lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start_rollout_id": 3}, "incarnation 2 starts at rollout 3; with native weights that is 2"),
        ({"source": "release", "iteration": None, "load_optimizer": False}, "with release weights that is 0"),
        ({"iteration": 4, "start_rollout_id": 5}, "actor/0 was filled with actor@2; the plan is actor@5"),
    ],
)
def test_a_start_at_another_rollout_or_with_other_weights_than_the_plan_is_found(
    run_dir: Path, changes: dict[str, Any], said: str
) -> None:
    resumed(run_dir, **changes)
    found(run_dir, said)


def test_a_start_that_the_user_asked_for_is_none(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    find(lines, kind="driver_started", incarnation=2)["start_rollout_id"] = 2
    write(run_dir, "driver", lines)
    assert findings(run_dir) == []
    drop(run_dir, "driver", {"kind": "trained", "rollout_id": 2, "incarnation": 2})
    found(run_dir, "incarnation 2 trains rollout 3 first; it starts at 2")


def test_a_refreshed_reference_that_came_back_as_the_original_is_found_on_every_rank(run_dir: Path) -> None:
    for rank in range(2):
        edit(run_dir, f"actor-{rank}", update(version=0), incarnation=2, trigger="loaded", slot="ref")
        came = f"incarnation 2 actor/{rank} came back with old_actor@0 and ref@0"
        found(run_dir, f"{came}; save-1-1 holds old_actor@0 and ref@2")


def test_a_slot_that_is_not_kept_any_more_may_come_back_otherwise(run_dir: Path) -> None:
    for rank in range(2):
        edit(run_dir, f"actor-{rank}", update(kept=["old_actor"]), incarnation=2, kind="created")
        edit(run_dir, f"actor-{rank}", update(version=0), incarnation=2, trigger="loaded", slot="ref")
    assert not [one for one in findings(run_dir) if "came back" in one]


def test_other_bytes_than_were_saved_are_found_where_the_run_itself_looked_away(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    find(lines, kind="continuity")["held"]["ref@2"] = "f" * 16
    write(run_dir, "driver", lines)
    found(run_dir, "incarnation 2 holds ref@2 with digest ffffffffffffffff; save-1-1 saved")


def test_a_jump_that_the_run_was_allowed_is_an_event(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    find(lines, kind="continuity").update(jumps=["KL to the reference is 0"], held={"actor": "f" * 16})
    write(run_dir, "driver", lines)
    assert findings(run_dir) == []
