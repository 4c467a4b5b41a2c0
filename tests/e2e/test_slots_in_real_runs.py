"""All four slots in real runs: the real loop, rank and engine, in one process.

In float32 the engine's log-probs are those of the weights that generated, up to rounding: they show whether the policy
that the ratio is taken to is the one that generated, at every step.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import merged
from tests.e2e.slot_jobs import ROLLOUTS, Told
from tests.workers.gang_processes import run_gang

pytestmark = pytest.mark.prove


JOBS = "tests.e2e.slot_jobs"
GAP = "rollout/train_engine_logprob_diff_max"
ROUNDING = 5e-6
CUT = 2
GREEDY = {"temperature": 0.0, "max_response_len": 4}

SMALL: dict[str, Any] = {
    "loop": {"num_rollout": ROLLOUTS},
    "train": {"lr": 1e-2},
    "algorithm": {"use_kl_loss": False, "kl_loss_coef": 0.0},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4},
}


def schedule(mode: str, interval: int, old_logprobs: str = "old_actor") -> dict[str, Any]:
    loop = {"mode": mode, "update_weights_interval": interval}
    return merged(SMALL, {"loop": loop, "algorithm": {"old_logprobs": old_logprobs}})


SCHEDULES = list(product(("sync", "async"), (1, 2, 3)))


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    asked = {f"{mode}-{interval}": (schedule(mode, interval), None) for mode, interval in SCHEDULES}
    asked["recomputed"] = (schedule("async", 2, "recompute"), None)
    (told,) = run_gang(f"{JOBS}:several", 1, (tmp_path_factory.mktemp("schedules"), asked), time_limit_s=240.0)
    return told


@pytest.mark.parametrize(("mode", "interval"), SCHEDULES)
def test_old_actor_is_exactly_what_generated_in_every_loop_and_interval(
    schedules: dict[str, Told], mode: str, interval: int
) -> None:
    told = schedules[f"{mode}-{interval}"]
    assert len(told.steps) == ROLLOUTS
    assert max(step[GAP] for step in told.steps) < ROUNDING
    assert told.findings == []


def test_a_behaviour_policy_that_moved_on_would_be_seen(schedules: dict[str, Told]) -> None:
    gaps = [step[GAP] for step in schedules["recomputed"].steps]
    assert gaps[0] < ROUNDING
    assert min(gaps[1:]) > 20 * ROUNDING


def test_one_snapshot_is_taken_at_each_publish_and_none_elsewhere(schedules: dict[str, Told]) -> None:
    for mode, interval in SCHEDULES:
        entries = schedules[f"{mode}-{interval}"].entries
        published = [e["version"] for e in entries if e.get("trigger") == "publish"]
        assert published == sorted({*range(0, ROLLOUTS, interval), ROLLOUTS})
        assert [e["version"] for e in entries if e["kind"] == "snapshot"] == published


def test_a_version_that_is_not_held_any_more_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = run_gang(f"{JOBS}:with_too_few_versions", 1, (tmp_path, schedule("async", 1)), time_limit_s=120.0)
    assert said.startswith("NotHeld")
    assert "old_actor@0: it was never filled here" in said
    assert "old_actor@1" in said


# ---- every slot at once, and what comes back -----------------------------------------------------------------


def every_slot(root: Path) -> dict[str, Any]:
    more = {
        "loop": {"mode": "async"},
        "algorithm": {"old_logprobs": "old_actor", "use_kl_loss": True, "kl_loss_coef": 0.1, "use_opd": True},
        "ref": {"update_interval": 2},
        "teacher": {"load": str(root / "school" / "checkpoints"), "ckpt_step": 1},
        "checkpoint": {"save_interval": 1},
    }
    return merged(SMALL, more)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    root = tmp_path_factory.mktemp("everything")
    every = every_slot(root)
    distilling = {"use_opd": True, "advantage_estimator": "on_policy_distillation"}
    alone = merged(
        SMALL,
        {
            "loop": {"num_rollout": 8},
            "train": {"lr": 3e-3},
            "rollout": {"rollout_batch_size": 16},
            "algorithm": distilling,
            "teacher": every["teacher"],
        },
    )
    offloaded = merged(
        SMALL, {"cluster": {"offload_train": True}, "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1}}
    )
    resting = merged(
        offloaded,
        {"eval": {"interval": 2, "data": {"generator": "largest_digit"}, "max_prompts": 2, "sampling": GREEDY}},
    )
    saved = {"checkpoint": {"save_interval": 2}}
    asked = {
        "school": (
            merged(SMALL, {"loop": {"num_rollout": 2}, "checkpoint": {"save_interval": 1}, "run": {"seed": 7}}),
            None,
        ),
        "whole": (every, None),
        "cut": (every, CUT),
        "as-loss": (merged(alone, {"algorithm": {"opd_mode": "loss"}}), None),
        "as-advantage": (alone, None),
        "resting": (merged(resting, saved), None),
        "awake": (merged(merged(resting, {"cluster": {"offload_train": False}}), saved), None),
    }
    (told,) = run_gang(f"{JOBS}:several", 1, (root, asked), time_limit_s=240.0)
    return told


def slots_of(marker: dict[str, Any]) -> dict[str, str]:
    return {f"{one['slot']}@{one['version']}": one["digest"] for one in marker["slots"]}


def test_a_checkpoint_holds_the_refreshed_reference_and_the_ring(everything: dict[str, Told]) -> None:
    saved = everything["whole"].saved
    assert {i: sorted(slots_of(marker)) for i, marker in saved.items()} == {
        0: ["old_actor@0", "ref@0"],
        1: ["old_actor@0", "old_actor@1", "ref@2"],
        2: ["old_actor@1", "old_actor@2", "ref@2"],
        3: ["old_actor@2", "old_actor@3", "ref@4"],
        4: ["old_actor@3", "old_actor@4", "ref@4"],
        5: ["old_actor@4", "old_actor@5", "ref@6"],
    }
    # The same weights have the same digest, whichever slot and checkpoint they stand in.
    digests = {marker["version"]: marker["digest"] for marker in saved.values()}
    for marker in saved.values():
        for name, digest in slots_of(marker).items():
            version = int(name.partition("@")[2])
            assert version == 0 or digest == digests[version]


def test_every_slot_comes_back_on_resume_as_it_was_and_the_run_ends_the_same(everything: dict[str, Told]) -> None:
    whole, cut = everything["whole"], everything["cut"]
    assert cut.last.plan.start_rollout_id == CUT + 1
    again = [e for e in cut.entries if e["incarnation"] == 2 and e.get("trigger") == "loaded"]
    kept = {
        f"{e['slot']}@{e['version']}": e["digest"] for e in cut.entries if e["kind"] == "kept" and e["incarnation"] == 1
    }
    loaded = {f"{e['slot']}@{e['version']}": e["digest"] for e in again}
    assert sorted(loaded) == ["actor@3", "old_actor@1", "old_actor@2", "ref@2", "teacher@2"]
    for name in ("old_actor@1", "old_actor@2", "ref@2"):
        assert loaded[name] == kept[name]
    keys = ("train/loss", "train/kl_loss", "train/opd_reverse_kl", GAP)
    assert [[s[k] for k in keys] for s in cut.steps] == [[s[k] for k in keys] for s in whole.steps]
    assert {i: m["tensors"] for i, m in cut.saved.items()} == {i: m["tensors"] for i, m in whole.saved.items()}
    assert whole.findings == cut.findings == []


def test_the_kl_falls_to_zero_where_the_reference_is_refreshed_and_only_there(everything: dict[str, Told]) -> None:
    kl = [step["train/kl_loss"] for step in everything["whole"].steps]
    assert [value < 1e-9 for value in kl] == [True, False, True, False, True, False]


@pytest.mark.parametrize("mode", ["as-advantage", "as-loss"])
def test_the_student_comes_closer_to_its_teacher(everything: dict[str, Told], mode: str) -> None:
    gaps = [step["train/opd_reverse_kl"] for step in everything[mode].steps]
    assert sum(gaps[-2:]) < 0.7 * sum(gaps[:2])


def test_a_run_whose_trainers_sleep_is_the_run_whose_trainers_do_not(everything: dict[str, Told]) -> None:
    resting, awake = everything["resting"], everything["awake"]
    assert {i: m["tensors"] for i, m in resting.saved.items()} == {i: m["tensors"] for i, m in awake.saved.items()}
    assert [s["train/kl_loss"] for s in resting.steps] == [s["train/kl_loss"] for s in awake.steps]
    triggers = [e["trigger"] for e in resting.entries if e["kind"] == "transition"]
    assert triggers.count("sleep") == ROLLOUTS + 1  # before each rollout, and for the last evaluation
    assert triggers.count("wake") == ROLLOUTS
    assert "sleep" not in [e.get("trigger") for e in awake.entries]
    assert resting.findings == []
