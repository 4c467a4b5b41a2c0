"""The resume decision, row by row: what was asked, what is there, what the plan is."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state.checkpoints import Incomplete, Inventory
from state.errors import ResumeError
from state.resume import LoadSpec, NoBase, ResumePlan, ResumeRequest, plan_resume, plan_slot_load

HF = LoadSpec("/hf", None, "huggingface")
ASK = ResumeRequest(load="/ckpt", base=HF, mode="raw")
CUT_OFF = (Incomplete(5, "iter_0000005", "the save was cut off"),)


def there(tracker: str | None = None, ours: tuple[int, ...] = (), **rest: object) -> Inventory:
    return replace(Inventory("/ckpt", True, tracker, ours), **rest)  # type: ignore[arg-type]


MISSING = Inventory("/ckpt", False)
EMPTY = there()


def fresh(plan: ResumePlan) -> bool:
    return plan.source == "fresh" and plan.start_rollout_id == 0 and not plan.load_optimizer and plan.load == HF


def only_weights(plan: ResumePlan) -> bool:
    return not any((plan.load_optimizer, plan.load_rng, plan.load_data))


def test_nothing_to_load_or_save_starts_fresh_from_the_base_weights() -> None:
    plan = plan_resume(replace(ASK, load=None), None)
    assert fresh(plan)
    assert plan.warnings == ()


@pytest.mark.parametrize("inventory", [MISSING, EMPTY])
def test_a_missing_or_empty_directory_warns_with_both_paths_or_is_an_error_under_must(inventory: Inventory) -> None:
    plan = plan_resume(ASK, inventory)
    assert fresh(plan)
    (warning,) = plan.warnings
    assert "/ckpt" in warning
    assert "/hf" in warning
    with pytest.raises(ResumeError, match=r"`must`.*/ckpt"):
        plan_resume(replace(ASK, resume="must"), inventory)


@pytest.mark.parametrize("inventory", [MISSING, EMPTY])
@pytest.mark.parametrize("step", [0, 3])
def test_a_step_of_a_missing_or_empty_directory_is_an_error(inventory: Inventory, step: int) -> None:
    with pytest.raises(ResumeError, match=f"iteration {step}.*/ckpt"):
        plan_resume(replace(ASK, ckpt_step=step), inventory)


def test_must_and_a_step_need_a_directory_to_look_in() -> None:
    with pytest.raises(ResumeError, match="must"):
        plan_resume(replace(ASK, load=None, resume="must"), None)
    with pytest.raises(ResumeError, match="ckpt_step"):
        plan_resume(replace(ASK, load=None, ckpt_step=0), None)


def test_a_hugging_face_directory_gives_weights_in_bridge_mode_and_names_convert_in_raw_mode() -> None:
    directory = there(is_huggingface=True, foreign=("config.json", "model.safetensors"))
    plan = plan_resume(replace(ASK, mode="bridge"), directory)
    assert (plan.source, plan.path, plan.start_rollout_id) == ("huggingface", "/ckpt", 0)
    assert only_weights(plan)
    with pytest.raises(ResumeError, match="slotwise convert /ckpt"):
        plan_resume(ASK, directory)
    with pytest.raises(ResumeError, match="no iterations"):
        plan_resume(replace(ASK, mode="bridge", ckpt_step=3), directory)


@pytest.mark.parametrize("mode", ["raw", "bridge"])
@pytest.mark.parametrize(("tracker", "start"), [("4", 5), ("12\n", 13), ("0", 1)])
def test_a_native_checkpoint_continues_after_its_iteration_in_both_modes(mode: str, tracker: str, start: int) -> None:
    plan = plan_resume(replace(ASK, mode=mode), there(tracker, (0, 4, 12)))  # type: ignore[arg-type]
    assert (plan.source, plan.start_rollout_id) == ("native", start)
    assert plan.load == LoadSpec("/ckpt", start - 1, "native")
    assert plan.load_optimizer
    assert plan.load_rng
    assert plan.load_data


@pytest.mark.parametrize("tracker", ["4", "release", "", "abc", None])
@pytest.mark.parametrize("step", [0, 3])
def test_an_explicit_step_is_taken_whatever_the_tracker_says(tracker: str | None, step: int) -> None:
    plan = plan_resume(replace(ASK, ckpt_step=step), there(tracker, (0, 3, 4)))
    assert (plan.iteration, plan.start_rollout_id) == (step, step + 1)


@pytest.mark.parametrize(
    ("path", "foreign", "meant"),
    [
        ("/runs/a", ("checkpoints", "config.yaml"), r"did you mean /runs/a/checkpoints\."),
        ("/ckpt/iter_0000003", ("data.json",), r"did you mean /ckpt with (checkpoint|ref)\.ckpt_step 3\."),
        ("/elsewhere", ("notes",), r"correct checkpoint\.load\.|name the iteration with ref\.ckpt_step\."),
    ],
)
def test_a_directory_beside_the_one_that_was_meant(path: str, foreign: tuple[str, ...], meant: str) -> None:
    named = replace(there(None), path=path, foreign=foreign)
    with pytest.raises(ResumeError, match=meant):
        plan_resume(replace(ASK, load=path), named)
    with pytest.raises(ResumeError, match=meant):
        plan_slot_load(path, None, named, "raw", "ref")


def test_an_explicit_step_that_is_missing_or_cut_off_lists_what_there_is() -> None:
    for step in (3, 5):
        with pytest.raises(ResumeError, match=r"2, 4.*iter_0000005"):
            plan_resume(replace(ASK, ckpt_step=step), there("4", (2, 4), incomplete=CUT_OFF))


def test_release_is_weights_alone_from_step_zero() -> None:
    plan = plan_resume(ASK, there("release", has_release=True))
    assert (plan.source, plan.start_rollout_id, plan.iteration) == ("release", 0, None)
    assert only_weights(plan)
    with pytest.raises(ResumeError, match="release directory is not there"):
        plan_resume(ASK, there("release"))


def test_killed_before_the_tracker_moved_uses_the_newest_complete_one_with_a_warning() -> None:
    plan = plan_resume(ASK, there(None, (1, 3), incomplete=CUT_OFF, foreign=("notes.txt",)))
    assert plan.start_rollout_id == 4
    assert "no tracker" in plan.warnings[0]


def test_only_cut_off_saves_start_fresh_with_a_warning_that_names_them() -> None:
    plan = plan_resume(ASK, there(incomplete=CUT_OFF))
    assert fresh(plan)
    assert "iter_0000005" in plan.warnings[0]
    with pytest.raises(ResumeError, match="iter_0000005"):
        plan_resume(replace(ASK, resume="must"), there(incomplete=CUT_OFF))


@pytest.mark.parametrize(
    "inventory",
    [
        there(foreign=("thesis.pdf",)),
        there(megatron=(7,)),
        there(foreign=("x",), incomplete=CUT_OFF),
        there(has_release=True),
    ],
)
def test_somebody_elses_files_without_a_tracker_are_an_error(inventory: Inventory) -> None:
    with pytest.raises(ResumeError, match=r"checkpoint\.load"):
        plan_resume(ASK, inventory)


@pytest.mark.parametrize("text", ["", "\n", "abc", "-1", "4 5"])
def test_a_bad_tracker_is_an_error_that_names_the_file(text: str) -> None:
    with pytest.raises(ResumeError, match=r"/ckpt/latest_checkpointed_iteration\.txt"):
        plan_resume(ASK, there(text, (4,)))


def test_a_tracker_that_names_an_incomplete_iteration_falls_back_to_the_one_before_it() -> None:
    plan = plan_resume(ASK, there("5", (2, 3, 8), incomplete=CUT_OFF))
    assert plan.iteration == 3
    assert "names iteration 5" in plan.warnings[0]
    with pytest.raises(ResumeError, match="no complete one comes before"):
        plan_resume(ASK, there("5", (8,), incomplete=CUT_OFF))


def test_complete_iterations_newer_than_the_tracker_are_mentioned() -> None:
    plan = plan_resume(ASK, there("4", (4, 6)))
    assert plan.iteration == 4
    assert "checkpoint.ckpt_step 6" in plan.warnings[0]


def test_weights_only_takes_a_native_checkpoint_without_its_state_and_starts_at_zero() -> None:
    plan = plan_resume(replace(ASK, weights_only=True), there("4", (4,), without_data=(4,)))
    assert (plan.source, plan.iteration, plan.start_rollout_id) == ("native", 4, 0)
    assert only_weights(plan)


def test_a_lost_data_cursor_is_an_error_unless_megatron_wrote_the_checkpoint() -> None:
    with pytest.raises(ResumeError, match="weights_only"):
        plan_resume(ASK, there("4", (4,), without_data=(4,)))
    plan = plan_resume(ASK, there("4", megatron=(4,)))
    assert plan.load_optimizer
    assert not plan.load_data
    assert "not written by Slotwise" in plan.warnings[0]


@pytest.mark.parametrize(
    ("inventory", "said"), [(there("4", (4,)), 5), (EMPTY, 0), (there("release", has_release=True), 0)]
)
def test_an_explicit_start_wins_and_is_reported_beside_what_the_checkpoint_says(
    inventory: Inventory, said: int
) -> None:
    plan = plan_resume(replace(ASK, start_rollout_id=12), inventory)
    assert plan.start_rollout_id == 12
    assert f"start at {said}" in plan.reason
    assert f"12 wins over {said}" in plan.warnings[-1]


def test_an_explicit_start_that_agrees_is_no_warning_and_zero_is_one() -> None:
    assert plan_resume(replace(ASK, start_rollout_id=5), there("4", (4,))).warnings == ()
    assert plan_resume(replace(ASK, start_rollout_id=0), there("4", (4,))).start_rollout_id == 0


def test_a_missing_base_is_an_error_only_for_a_fresh_start() -> None:
    ask = replace(ASK, base=NoBase("no weights anywhere"))
    assert plan_resume(ask, there("4", (4,))).start_rollout_id == 5
    with pytest.raises(ResumeError, match="no weights anywhere"):
        plan_resume(ask, EMPTY)


def test_the_json_has_the_documented_keys() -> None:
    plan = plan_resume(ASK, there("4", (4,)))
    value = plan.to_json()
    assert set(value) == {
        "source", "path", "iteration", "start_rollout_id", "load_optimizer", "load_rng", "load_data", "reason",
        "warnings",
    }  # fmt: skip
    assert (value["source"], value["path"], value["iteration"]) == ("native", "/ckpt", 4)


@pytest.mark.parametrize("step", [0, 3])
def test_the_actors_step_does_not_reach_another_slot_nor_the_other_way_round(step: int) -> None:
    shared = there("4", (0, 3, 4))
    actor = plan_resume(replace(ASK, ckpt_step=step), shared)
    ref = plan_slot_load("/ckpt", None, shared, "raw", "ref")
    assert (actor.iteration, ref.iteration) == (step, 4)
    ref = plan_slot_load("/ckpt", step, shared, "raw", "ref")
    assert (plan_resume(ASK, shared).iteration, ref.iteration) == (4, step)


def test_what_a_load_needs_cannot_be_changed() -> None:
    """So there is nothing to put back when a load raises."""
    for frozen in (plan_slot_load("/ckpt", 3, there("4", (0, 3, 4)), "raw", "ref"), ASK):
        for field in fields(frozen):
            with pytest.raises(FrozenInstanceError):
                setattr(frozen, field.name, None)


def test_a_slot_loads_what_is_named_or_nothing() -> None:
    assert plan_slot_load("/ckpt", None, there("release", has_release=True), "raw", "ref").kind == "release"
    hf = there(is_huggingface=True, foreign=("config.json",))
    assert plan_slot_load("/ckpt", None, hf, "bridge", "ref").kind == "huggingface"
    for inventory, step, said in [
        (hf, None, "slotwise convert"),
        (MISSING, None, "does not exist"),
        (EMPTY, 0, "nothing in it"),
        (there(None, (3,)), None, r"ref\.ckpt_step.*iterations 3"),
        (there("5", (3,), incomplete=CUT_OFF), None, r"names 5.*ref\.ckpt_step"),
        (there("4", (4,)), 3, r"ref\.ckpt_step asks for iteration 3"),
        (there("abc", (4,)), None, "latest_checkpointed_iteration"),
    ]:
        with pytest.raises(ResumeError, match=f"(?s){said}"):
            plan_slot_load("/ckpt", step, inventory, "raw", "ref")


iterations = st.sets(st.integers(0, 6)).map(lambda s: tuple(sorted(s)))


@given(
    ask=st.builds(
        ResumeRequest,
        load=st.just("/ckpt"),
        base=st.sampled_from([HF, NoBase("none"), LoadSpec.random()]),
        ckpt_step=st.none() | st.integers(0, 6),
        mode=st.sampled_from(["raw", "bridge"]),
        resume=st.sampled_from(["auto", "must"]),
        weights_only=st.booleans(),
        start_rollout_id=st.none() | st.integers(0, 9),
    ),
    inventory=st.builds(
        Inventory,
        path=st.just("/ckpt"),
        exists=st.just(True),
        tracker=st.none() | st.sampled_from(["", "abc", "release", "0", "3", "6\n"]),
        ours=iterations,
        megatron=iterations,
        incomplete=st.sampled_from([(), CUT_OFF]),
        has_release=st.booleans(),
        foreign=st.sampled_from([(), ("x",)]),
        is_huggingface=st.booleans(),
    ),
)
def test_every_situation_has_a_plan_with_a_reason_or_an_error_with_one(
    ask: ResumeRequest, inventory: Inventory
) -> None:
    try:
        plan = plan_resume(ask, inventory)
    except ResumeError:
        return
    assert plan.reason
    assert plan.load.kind != "native" or plan.load.iteration in inventory.complete
    if ask.start_rollout_id is not None:
        assert plan.start_rollout_id == ask.start_rollout_id
    elif plan.load_optimizer:
        assert plan.start_rollout_id == (plan.load.iteration or 0) + 1
    else:
        assert plan.start_rollout_id == 0
