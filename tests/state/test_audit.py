"""The audit finds what was done to the journals of a sound run, and nothing in a sound or a killed one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from state.audit import audit, latest_views
from state.journal import Journal
from state.slots import Slot, WeightId
from tests.state.journal_edits import drop, edit, entries, find, findings, found, update, write
from tests.state.toy_run import ToyRun, whole_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "run"
    whole_run(directory)
    return directory


# ---- sound runs ------------------------------------------------------------------------------------------------


def test_a_sound_run_has_no_findings(sound: Path) -> None:
    report = audit(sound)
    assert report.findings == ()
    assert report.ok
    assert "2 ranks, 2 engines, 2 starts" in report.summary()
    text = report.timeline()
    assert "publish-1-1 committed: actor@1.0" in text
    assert "saved actor@1.2" in text
    assert "actor@0 > ref@0 > actor@0 > publishing(publish-1-1) > actor@0" in text
    assert "serving 1.0 > updating > serving 1.1" in text
    as_json = json.loads(json.dumps(report.to_json()))
    assert as_json["ok"] is True
    assert set(as_json["ranks"]) == {"actor/0", "actor/1"}
    assert [m["transition"] for m in as_json["ranks"]["actor/1"]][:3] == [1, 2, 3]


def test_refused_torn_and_aborted_publishes_and_poison_are_events(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, torn=("engine-1",))
    run.begin()
    run.publish()
    run.publish(fail=lambda: None)
    with pytest.raises(Exception, match="already at version"), run.workers[0].machine.step(-1):
        pytest.fail("got in")
    run.driver.append("publish", publish_id="publish-1-9", outcome="refused", reason="the gang does not agree")
    with pytest.raises(ZeroDivisionError), run.workers[1].machine.borrow(Slot.REF):
        run.workers[1].store.bring = lambda *_: 1 / 0  # type: ignore[method-assign]
    run.finish("failed")
    report = audit(tmp_path)
    assert report.findings == ()
    said = "\n".join(map(str, report.events))
    for word in ("refused to train rollout -1", "engine-1: abort, 1 tensors differ", "aborted: Lost", "poisoned while"):
        assert word in said
    assert "the gang does not agree" in said


def test_torch_is_not_imported(sound: Path) -> None:
    code = "import sys, pathlib, state.audit as a; assert a.audit(pathlib.Path(sys.argv[1])).ok"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(sound)], check=True, timeout=60)


# ---- killed runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int]]]:
    """A first incarnation, and the sizes of its journals after each entry: every moment at which it can be killed."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    moments: list[dict[str, int]] = []
    real = Journal.append

    def append(journal: Journal, kind: str, **fields: Any) -> dict[str, Any]:
        entry = real(journal, kind, **fields)
        moments.append({p.name: p.stat().st_size for p in (directory / "journal").glob("*.jsonl")})
        return entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", append)
        run = ToyRun(directory)
        run.begin()
        run.rollouts(2, save_after=(0, 1))
        run.finish()
    return directory, moments


def killed_at(source: Path, sizes: dict[str, int], target: Path, torn: int) -> None:
    """The journals as a kill left them: whole, or with `torn` bytes of the next line."""
    (target / "journal").mkdir(parents=True)
    for name, size in sizes.items():
        (target / "journal" / name).write_bytes((source / "journal" / name).read_bytes()[: size + torn])


@pytest.mark.parametrize("torn", [0, 9])
def test_a_kill_at_any_moment_is_no_violation(
    sizes: tuple[Path, list[dict[str, int]]], tmp_path: Path, torn: int
) -> None:
    source, moments = sizes
    for number, moment in enumerate(moments[:-3]):  # up to the end of the run, after which engines die
        target = tmp_path / str(number)
        killed_at(source, moment, target, torn)
        assert findings(target) == [], moment
        assert any("cut short" in str(event) for event in audit(target).events)


def test_the_next_incarnation_continues_after_a_kill(sizes: tuple[Path, list[dict[str, int]]], tmp_path: Path) -> None:
    source, moments = sizes
    for number, moment in enumerate(moments[:-3:6]):
        target = tmp_path / str(number)
        killed_at(source, moment, target, torn=5)
        run = ToyRun(target, incarnation=2)
        run.begin()
        run.rollouts(1)
        run.finish()
        assert findings(target) == []
        assert any("cut off" in str(event) for event in audit(target).events)


def test_a_gang_that_failed_and_was_rebuilt_under_the_same_engines_is_no_violation(tmp_path: Path) -> None:
    first = rebuilt_run(tmp_path)
    report = audit(tmp_path)
    assert [str(finding) for finding in report.findings] == []
    assert [start.ended for start in report.driver.starts.values()] == ["failed", "done"]
    assert any("the gang of incarnation 1 failed and was rebuilt (1 of 3)" in str(event) for event in report.events)
    assert report.engines["engine-0"].newest == WeightId(2, 3)
    assert len(report.engines["engine-0"].lives) == 1
    assert [life.incarnation for life in report.ranks[0].lives.values()] == [1, 2]
    assert first.incarnation == 1


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ({"kind": "gang_failed"}, "a gang was rebuilt, and that of 1 had not failed"),
        ({"kind": "gang_rebuild"}, "is of incarnation 2 during 1"),
    ],
)
def test_a_rebuild_that_is_told_by_half_is_found(tmp_path: Path, drop: dict[str, str], said: str) -> None:
    rebuilt_run(tmp_path)
    lines = [e for e in entries(tmp_path, "driver") if e["kind"] not in (drop["kind"], "gang_started")]
    write(tmp_path, "driver", lines)
    found(tmp_path, said)


def test_a_run_that_is_done_with_a_failed_gang_is_found(tmp_path: Path) -> None:
    rebuilt_run(tmp_path)
    lines = entries(tmp_path, "driver")
    failed = find(lines, kind="gang_failed") | {"incarnation": 2, "rebuild": False}
    write(tmp_path, "driver", [*lines[:-1], failed, lines[-1]])
    found(tmp_path, "the run is done, although the gang of incarnation 2 failed")


def rebuilt_run(directory: Path) -> ToyRun:
    first = ToyRun(directory)
    first.begin()
    first.rollouts(2, save_after=(0,))
    second = first.rebuilt(start=2)
    second.rollouts(3)
    second.finish()
    return first


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor-0", "actor-1", "driver", "fleet"])
def test_any_line_dropped_doubled_or_moved_is_found(run_dir: Path, name: str) -> None:
    lines = entries(run_dir, name)
    for i in range(len(lines) - 1):
        for damaged in (
            lines[:i] + lines[i + 1 :],
            lines[: i + 1] + lines[i:],
            [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]],
        ):
            write(run_dir, name, damaged, renumber=False)
            found(run_dir, "entries were lost, doubled or moved")


@pytest.mark.parametrize("name", ["actor-0", "actor-1", "driver", "fleet"])
def test_any_line_dropped_with_the_numbers_mended_is_found(run_dir: Path, name: str) -> None:
    lines = entries(run_dir, name)
    harmless = {"driver_started"}  # gang_started says the same
    for i, line in enumerate(lines):
        if line["kind"] in harmless or line.get("trigger") == "die":
            continue
        write(run_dir, name, [dict(e) for j, e in enumerate(lines) if j != i])
        assert findings(run_dir) or line["kind"] == "run_ended", line


def test_a_line_in_the_middle_that_is_no_json_is_found(run_dir: Path) -> None:
    path = run_dir / "journal" / "actor-0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], "xx", *lines[6:]]) + "\n")
    found(run_dir, "damaged, and not read any further")


def test_entries_without_their_fields_are_found_and_do_not_end_the_audit(run_dir: Path) -> None:
    for name in ("actor-0", "driver", "fleet"):
        lines = entries(run_dir, name)
        write(
            run_dir, name, [{"seq": e["seq"], "kind": e["kind"], "source": e["source"]} for e in lines], renumber=False
        )
    for what in ("not an entry of a worker", "not an entry of the driver", "not an entry of an engine"):
        found(run_dir, what)


@pytest.mark.parametrize("name", ["actor-1", "driver", "fleet"])
def test_a_journal_that_is_not_there_is_found(run_dir: Path, name: str) -> None:
    (run_dir / "journal" / f"{name}.jsonl").unlink()
    assert not audit(run_dir).ok


def test_a_directory_without_journals_is_not_found_sound(tmp_path: Path) -> None:
    assert not audit(tmp_path).ok


# ---- the faults that started it all ----------------------------------------------------------------------------


def test_a_publish_from_the_reference_is_found(run_dir: Path) -> None:
    """On one rank, with the numbers in order: ref is live when bytes go out."""
    lines = entries(run_dir, "actor-1")
    at = lines.index(find(lines, trigger="publish", publish_id="publish-1-2"))
    ref = next(e for e in lines if e.get("trigger") == "loaded" and e["slot"] == "ref")
    about_ref = {"slot": "ref", "version": ref["version"], "digest": ref["digest"]}
    switch = lines[at] | {"trigger": "switch", "after": "switching", "slot": "ref", "version": None}
    switched = lines[at] | {"trigger": "switched", "before": "switching", "after": "resident.ref"} | about_ref
    del switch["publish_id"], switch["digest"], switched["publish_id"]
    lines[at] = lines[at] | {"before": "resident.ref"} | about_ref
    write(run_dir, "actor-1", [*lines[:at], switch, switched, *lines[at:]])
    found(run_dir, "publish ref from resident.ref to publishing: it may not happen there")
    found(run_dir, "publish-1-2 let resident.ref out, not the resident actor")


def test_bytes_of_the_reference_under_the_actors_name_are_found(run_dir: Path) -> None:
    digest = find(entries(run_dir, "actor-0"), trigger="loaded", slot="ref")["digest"]
    edit(run_dir, "actor-0", update(digest=digest), trigger="publish", publish_id="publish-1-2")
    found(run_dir, f"publish is about actor@1 with digest {digest}; recorded is 1 with digest")
    found(run_dir, "publish-1-2: actor/0 held 1 with digest")


def test_a_switch_that_brought_other_bytes_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(digest="f" * 16), trigger="switched", slot="ref")
    found(run_dir, "switched is about ref@0 with digest ffffffffffffffff; recorded is 0 with digest")


def test_a_transition_that_starts_elsewhere_or_is_numbered_otherwise_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(before="resident.ref"), trigger="load", slot="ref")
    found(run_dir, "load starts in resident.ref, but the last transition ended in resident.actor")
    edit(run_dir, "actor-1", update(transition=99), trigger="load", slot="ref")
    found(run_dir, "transition 99 follows transition 2")


def test_a_step_of_another_slot_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(slot="ref"), trigger="step", rollout_id=1)
    found(run_dir, "step is about ref, not about the primary actor")


def test_entries_of_another_rank_or_incarnation_are_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(rank=7), trigger="step", rollout_id=1)
    found(run_dir, "this entry is of actor/7 in incarnation 1, which this journal is not in")
    edit(run_dir, "actor-1", update(incarnation=2), trigger="step", rollout_id=1)
    found(run_dir, "this entry is of actor/1 in incarnation 2")


def test_an_incarnation_that_begins_twice_on_a_rank_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-0", update(incarnation=1), kind="created", incarnation=2)
    found(run_dir, "incarnation 1 begins after incarnation 1")


def test_a_snapshot_of_anything_but_the_resident_actor_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "actor-0")
    switched = find(lines, trigger="switched", slot="ref")
    snapshot = {k: switched[k] for k in ("source", "at", "run", "role", "rank", "world_size", "incarnation", "digest")}
    snapshot |= {"kind": "snapshot", "slot": "old_actor", "version": 0}
    at = lines.index(switched) + 1
    write(run_dir, "actor-0", [*lines[:at], snapshot, *lines[at:]])
    found(run_dir, "a snapshot was taken in state resident.ref")
    found(run_dir, "a snapshot is about actor@0 with digest")


@pytest.mark.parametrize("trigger", ["step", "sleep", "publish", "save"])
def test_a_trigger_that_is_not_in_the_table_is_found(run_dir: Path, trigger: str) -> None:
    changes = update(trigger=trigger, rollout_id=1, publish_id="publish-1-9")
    edit(run_dir, "actor-0", changes, trigger="switched", slot="ref", transition=11)
    found(run_dir, f"{trigger} ref from switching to resident.ref: it may not happen there")


def test_a_skipped_commit_is_found(run_dir: Path) -> None:
    """The step of rollout 1 never happened on rank 0, as far as its journal says; numbers are in order."""
    drop(run_dir, "actor-0", {"trigger": "step", "rollout_id": 1}, {"trigger": "commit", "rollout_id": 1})
    found(run_dir, "actor/0 has no commit of rollout 1, trained")


def test_a_commit_that_nobody_ordered_is_found(run_dir: Path) -> None:
    drop(run_dir, "driver", {"kind": "trained", "rollout_id": 1})
    found(run_dir, "actor/0 committed rollout 1, which the driver does not know as trained")


def test_a_commit_to_another_version_is_found(run_dir: Path) -> None:
    edit(run_dir, "actor-1", update(version=9), trigger="commit", rollout_id=1)
    found(run_dir, "rollout 1 was committed as version 9, not 2")
    found(run_dir, "rollout 1 is version 9 here, 2 for the driver")


@pytest.mark.parametrize(("purpose", "publish_id"), [("publish", "publish-1-3"), ("save", "save-1-1")])
def test_a_rank_that_took_no_part_is_found(run_dir: Path, purpose: str, publish_id: str) -> None:
    drop(
        run_dir,
        "actor-1",
        {"trigger": purpose, "publish_id": publish_id},
        {"trigger": "done", "publish_id": publish_id},
    )
    found(run_dir, f"actor/1 has no {purpose} {publish_id}")


@pytest.mark.parametrize(("kind", "publish_id"), [("publish", "publish-1-2"), ("save", "save-1-1")])
def test_bytes_that_left_without_the_driver_are_found(run_dir: Path, kind: str, publish_id: str) -> None:
    drop(run_dir, "driver", {"kind": kind, "publish_id": publish_id})
    found(run_dir, f"actor/0 entered {kind} {publish_id}, which the driver does not know")


def test_a_publish_that_the_gang_had_refused_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    publish = find(lines, publish_id="publish-1-2")
    kept = ("seq", "kind", "source", "at", "publish_id")
    refused = {"outcome": "refused", "reason": "no"} | {k: publish[k] for k in kept}
    lines[lines.index(publish)] = refused
    write(run_dir, "driver", lines)
    found(run_dir, "actor/0 entered publish publish-1-2")
    found(run_dir, "engine-0 serves 1.1 of publish-1-2, which was refused")


def test_a_rank_that_moved_after_it_attested_is_found(run_dir: Path) -> None:
    publish = find(entries(run_dir, "driver"), publish_id="publish-1-2")
    transitions = [publish["transitions"][0], publish["transitions"][1] - 2]
    edit(run_dir, "driver", update(transitions=transitions), publish_id="publish-1-2")
    found(run_dir, f"actor/1 attested at transition {transitions[1]} and let bytes out at {transitions[1] + 3}")


def test_a_quorum_of_too_few_is_found(run_dir: Path) -> None:
    def one_rank(entry: dict[str, Any]) -> None:
        entry["transitions"], entry["summaries"] = entry["transitions"][:1], entry["summaries"][:1]

    edit(run_dir, "driver", one_rank, publish_id="publish-1-2")
    found(run_dir, "publish-1-2 was agreed by 1 ranks of a gang of 2")


@pytest.mark.parametrize("kind", ["publish", "save"])
def test_two_digests_of_the_same_weights_are_found(run_dir: Path, kind: str) -> None:
    edit(run_dir, "driver", update(digest="f" * 16), kind=kind, version=2)
    found(run_dir, "names 1.2 with digest")


def test_training_before_init_was_verified_is_found(run_dir: Path) -> None:
    drop(run_dir, "actor-0", {"trigger": "ready"})
    found(run_dir, "publish before ready had verified actor")


def test_weights_that_go_back_are_found(run_dir: Path) -> None:
    edit(run_dir, "driver", update(version=0), kind="publish", version=3, incarnation=1)
    found(run_dir, "actor/0 held 3 with digest")
    edit(run_dir, "driver", update(incarnation=1), kind="driver_started", incarnation=2)
    found(run_dir, "incarnation 1 begins after incarnation 1")


# ---- engines ---------------------------------------------------------------------------------------------------


def test_an_engine_that_serves_another_version_is_found(run_dir: Path) -> None:
    edit(run_dir, "fleet", update(version=7), engine="engine-1", trigger="commit", publish_id="publish-1-2")
    found(run_dir, "engine-1 serves 1.7 after publish-1-2, which published 1.1")
    found(run_dir, "engine-1: went back from weights 1.7 to 1.2")


def test_an_engine_that_serves_what_it_was_not_proven_to_hold_is_found(run_dir: Path) -> None:
    verdict = {"engine-0": "committed", "engine-1": "torn: norm.weight differs"}
    edit(run_dir, "driver", update(engines=verdict), publish_id="publish-1-2")
    found(run_dir, "engine-1 serves 1.1 of publish-1-2, where the driver found it torn: norm.weight differs")


def test_an_engine_that_serves_an_aborted_publish_is_found(run_dir: Path) -> None:
    edit(run_dir, "driver", update(outcome="aborted"), publish_id="publish-1-2")
    found(run_dir, "engine-0 serves 1.1 of publish-1-2, which was aborted")


def test_an_engine_that_serves_without_an_update_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "fleet")
    lines.remove(find(lines, engine="engine-0", trigger="begin_update", publish_id="publish-1-1"))
    for entry in lines:
        if entry["engine"] == "engine-0" and entry["kind"] == "engine" and entry["transition"] > 2:
            entry["transition"] -= 1
    write(run_dir, "fleet", lines)
    found(run_dir, "engine-0: commit starts in updating, but the last transition ended in stale")


def test_an_engine_committed_for_the_driver_alone_is_found(run_dir: Path) -> None:
    lines = [e for e in entries(run_dir, "fleet") if e["engine"] != "engine-1"]
    write(run_dir, "fleet", lines)
    found(run_dir, "publish-1-1 was committed to engine-1, which has no entry of it")


# ---- views -----------------------------------------------------------------------------------------------------


def test_the_latest_views_are_those_of_the_machines_at_the_end(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.begin()
    run.rollouts(2)
    quorum = run.agree("save-1-9")
    with run.workers[0].machine.saving(quorum), run.workers[1].machine.borrow(Slot.REF):
        views = latest_views(tmp_path)
        live = [worker.machine.view().to_json() for worker in run.workers]
    assert (views["source"], views["ended"]) == ("journal", None)
    assert views["run"] == "run"
    for row, expected in zip(views["workers"], live, strict=True):
        assert row.pop("since") == pytest.approx(expected.pop("since"), abs=1)
        assert row == expected
    assert [(e["engine"], e["state"], e["version"], e["behind_by"]) for e in views["engines"]] == [
        ("engine-0", "serving", 2, 0),
        ("engine-1", "serving", 2, 0),
    ]


def test_a_view_of_a_snapshot_and_of_a_sleeper(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.begin()
    run.rollouts(2)
    run.workers[0].machine.snapshot(Slot.REF)
    run.workers[1].machine.sleep()
    with run.workers[0].machine.borrow(Slot.REF):
        rows = latest_views(tmp_path)["workers"]
        live = [worker.machine.view().to_json() for worker in run.workers]
    keys = ("state", "slot", "version", "digest", "provenance", "tier", "detail")
    assert [[row[k] for k in keys] for row in rows] == [[row[k] for k in keys] for row in live]
    assert rows[0]["provenance"] == "snapshot of actor@2"


# ---- every other contradiction ---------------------------------------------------------------------------------

ONE_FIELD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ref came in where teacher was on its way": ("actor-0", {"slot": "teacher"}, {"trigger": "switch", "slot": "ref"}),
    "commit of rollout 1 ends the step of rollout 5": (
        "actor-0",
        {"rollout_id": 5},
        {"trigger": "step", "rollout_id": 1},
    ),
    "version 1 was committed over version 1": ("actor-0", {"version": 1}, {"trigger": "commit", "rollout_id": 1}),
    "quorum publish-1-2 was used twice on this rank": (
        "actor-0",
        {"publish_id": "publish-1-2"},
        {"trigger": "publish", "publish_id": "publish-1-3"},
    ),
    "done of publish-1-9, which was not under way": (
        "actor-0",
        {"publish_id": "publish-1-9"},
        {"trigger": "done", "publish_id": "publish-1-3"},
    ),
    "save-1-1 is a save, not a publish": (
        "actor-0",
        {"trigger": "publish", "after": "publishing"},
        {"trigger": "save", "publish_id": "save-1-1"},
    ),
    "actor/1 was in a gang of 3; the driver started one of 2": ("actor-1", {"world_size": 3}, {"kind": "created"}),
    "publish-1-2 published ref": ("driver", {"slot": "ref"}, {"publish_id": "publish-1-2"}),
    "publish-1-4 published 1.0 after 1.2": ("driver", {"version": 0}, {"publish_id": "publish-1-4"}),
    "publish-1-2 is of incarnation 2 during 1": ("driver", {"incarnation": 2}, {"publish_id": "publish-1-2"}),
    "quorum publish-1-1 was used twice": ("driver", {"publish_id": "publish-1-1"}, {"publish_id": "publish-1-2"}),
    "iteration 5 was saved with weights of version 2": ("driver", {"iteration": 5}, {"publish_id": "save-1-1"}),
    "rollout 1 was trained to version 3, not 2": ("driver", {"version": 3}, {"kind": "trained", "rollout_id": 1}),
    "rollout 0 was trained after rollout 0": ("driver", {"rollout_id": 0}, {"kind": "trained", "rollout_id": 1}),
    "engine-0: it is stale with weights 1.0": ("fleet", {"incarnation": 1, "version": 0}, {"trigger": "started"}),
    "engine-0: it is serving with weights None": ("fleet", {"version": None}, {"trigger": "commit"}),
    "engine-0: committed publish publish-1-2 while publish-1-1 was under way": (
        "fleet",
        {"publish_id": "publish-1-2"},
        {"trigger": "commit"},
    ),
    "engine-0: transition 9 follows transition 2": ("fleet", {"transition": 9}, {"trigger": "commit"}),
    "engine-0: wake from updating to serving: it may not happen there": (
        "fleet",
        {"trigger": "wake"},
        {"trigger": "commit"},
    ),
    "engine-0 serves 1.0 of publish-1-7, which the driver does not know": (
        "fleet",
        {"publish_id": "publish-1-7"},
        {"trigger": "commit"},
    ),
}


@pytest.mark.parametrize("said", ONE_FIELD)
def test_one_changed_field_is_found(run_dir: Path, said: str) -> None:
    name, change, where = ONE_FIELD[said]
    edit(run_dir, name, update(**change), **where)
    found(run_dir, said)


def test_a_slot_that_was_never_filled_is_found(run_dir: Path) -> None:
    drop(run_dir, "actor-0", {"trigger": "load", "slot": "ref"}, {"trigger": "loaded", "slot": "ref"})
    found(run_dir, "switched is about ref@0, which was never filled")


def test_an_actor_loaded_back_to_an_older_version_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "actor-0")
    loaded = find(lines, trigger="loaded", slot="actor", incarnation=2)
    at = lines.index(loaded)
    again = [dict(lines[at - 1]) | {"before": "resident.actor"}, dict(loaded) | {"version": 1}]
    write(run_dir, "actor-0", [*lines[: at + 1], *again, *lines[at + 1 :]])
    found(run_dir, "actor went back from version 2 to 1")


def test_a_publish_before_the_gang_had_started_is_found(run_dir: Path) -> None:
    drop(run_dir, "driver", {"kind": "gang_started", "incarnation": 1})
    found(run_dir, "publish-1-1 came before the gang had started")


def test_an_incarnation_that_the_driver_does_not_know_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "driver")
    write(run_dir, "driver", lines[: lines.index(find(lines, kind="driver_started", incarnation=2))])
    found(run_dir, "actor/0 was in incarnation 2, which the driver does not know")


def test_a_rank_without_a_journal_of_an_incarnation_is_found(run_dir: Path) -> None:
    lines = entries(run_dir, "actor-1")
    write(run_dir, "actor-1", lines[: lines.index(find(lines, kind="created", incarnation=2))])
    found(run_dir, "actor/1 has no journal of incarnation 2, a gang of 2")


@pytest.mark.parametrize(
    ("left", "said"), [("publish", "never left publish publish-2-2"), ("switch", "ends in switching")]
)
def test_a_rank_that_stops_half_way_in_a_run_that_did_not_is_found(run_dir: Path, left: str, said: str) -> None:
    lines = entries(run_dir, "actor-1")
    last = max(i for i, e in enumerate(lines) if e.get("trigger") == left)
    write(run_dir, "actor-1", lines[: last + 1])
    found(run_dir, said)


def test_a_second_journal_of_a_rank_is_found(run_dir: Path) -> None:
    shutil.copy(run_dir / "journal" / "actor-1.jsonl", run_dir / "journal" / "copy.jsonl")
    found(run_dir, "actor/1 has another journal, actor-1.jsonl; this one is not read")
