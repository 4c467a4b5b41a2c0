"""What comes back after a start (I10), and which checkpoints there are to come back to (I11)."""

from __future__ import annotations

from tests.prove.mutant import T_CHECKPOINTS, T_PLAN, T_RESUME, Trace, mutant

SAVES = "state/saves.py"
ON_DISK = "directories of checkpoints are on disk, not in journals"

MUTANTS = (
    mutant(
        "`release` resumes at step 1",
        "I10",
        (
            "state/resume.py",
            'return _weights_alone("release", spec, f"the tracker in {request.load} says `release`: weights alone")',
            'return replace(_weights_alone("release", spec, "weights alone"), start_rollout_id=1)',
        ),
        killers=(f"{T_RESUME}::test_release_is_weights_alone_from_step_zero",),
        trace=Trace("whole_scenarios:release", r"incarnation 1 starts at rollout 1; with release weights that is 0"),
    ),
    mutant(
        "a refreshed reference comes back as the original",
        "I10",
        (
            "orchestrator/resume/slot_plan.py",
            "    loads = [one for one in kept if one.slot is Slot.REF]\n",
            "    loads: list[SlotLoad] = []\n",
        ),
        killers=(
            f"{T_PLAN}::test_a_refreshed_reference_comes_from_the_checkpoint_and_an_unchanged_one_from_the_configuration",
        ),
        trace=Trace("whole_scenarios:refreshed_and_resumed", r"actor/1 came back with .*ref@0; save-1-1 holds .*ref@2"),
    ),
    mutant(
        "a slot beside the actor is loaded from the actor's own weights",
        "I10",
        ("workers/megatron/checkpoint.py", ' / (load.part or "")\n        case "release"', '\n        case "release"'),
        killers=("tests/workers/test_megatron_checkpoint.py::test_directories_of_load_specs",),
        trace="the run finds it out before it publishes, and ends: an event, and nothing that went wrong",
    ),
    mutant(
        "nobody compares the slots that came back with those that were saved",
        "I10",
        (
            "orchestrator/resume/continuity.py",
            "        if saved is not None and saved != one.digest:\n",
            '        if saved == "":\n',
        ),
        killers=(
            "tests/orchestrator/resume/test_confirm_resume.py::"
            "test_a_slot_beside_the_actor_that_is_not_what_was_saved_ends_the_run_with_three",
        ),
        trace=Trace(
            "whole_scenarios:a_reference_that_rotted", r"incarnation 2 holds ref@2 with digest \w+; save-1-1 saved"
        ),
    ),
    mutant(
        "retention deletes what the tracker names",
        "I11",
        (SAVES, "if n != named and n not in protect", "if n not in protect"),
        (SAVES, "[n for n in inventory.ours if n <= named]", "[*inventory.ours]"),
        killers=(f"{T_CHECKPOINTS}::test_retention_never_removes_the_named_the_protected_or_the_foreign",),
        trace=ON_DISK,
    ),
    mutant(
        "the tracker moves before the marker is there",
        "I11",
        (
            SAVES,
            '    _commit(iteration_dir(root, iteration), {**marker, "iteration": iteration})\n',
            '    _write_atomically(Path(root) / TRACKER, f"{iteration}\\n".encode())\n'
            '    _commit(iteration_dir(root, iteration), {**marker, "iteration": iteration})\n',
        ),
        killers=(f"{T_CHECKPOINTS}::test_marker_comes_before_tracker_and_tracker_before_retention",),
        trace=ON_DISK,
    ),
)
