"""When a resumed run is checked against what was saved, and what a difference costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.resume.continuity import ContinuityBroken, Expected, confirm, expected
from state import checkpoints, saves
from state.continuity import Probe
from state.resume import LoadSpec, ResumePlan, ResumeRequest, plan_resume
from tests.orchestrator.saved_checkpoint import DATA

PROBE = Probe("float32", (-1.0, -2.0), (-1.1, -1.9), 0.75, 12, (0.3, 0.02))


KEPT = {"ref@4": "re0f", "old_actor@4": "01d4"}


def held(digest: str = "abcd", **kept: str) -> Any:
    """What the gang swears to. `kept`: digests of slots beside the actor that are not those of `KEPT`."""
    slots = [SimpleNamespace(slot=n.split("@")[0], version=4, digest=kept.get(n[:-2], d)) for n, d in KEPT.items()]
    return SimpleNamespace(digest=digest, kept=slots)


def saved(root: Path, probe: Probe | None = PROBE) -> Path:
    directory = saves.begin(root, 4)
    saves.write_data(directory, DATA)
    if probe is not None:
        saves.write_probe(directory, probe)
    slots = [{"slot": name.split("@")[0], "version": 4, "digest": digest} for name, digest in KEPT.items()]
    saves.commit(root, 4, {"digest": "abcd", "dtype": "float32", "slots": slots}, None)
    return directory


def expectation(root: Path, dtype: str = "float32", **checkpoint: Any) -> Expected | None:
    weights_only = bool(checkpoint.get("weights_only"))
    request = ResumeRequest(str(root), LoadSpec.random(), weights_only=weights_only)
    plan: ResumePlan = plan_resume(request, checkpoints.inspect(root))
    return expected(Config.model_validate({"model": {"dtype": dtype}, "checkpoint": checkpoint}), plan).get("actor")


def test_what_was_saved_costs_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    asked = expectation(tmp_path, resume="must")
    assert asked is not None
    assert confirm(asked, held(), lambda: PROBE) == ()


def test_where_it_must_be_right_a_jump_ends_the_run_with_three(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    asked = expectation(tmp_path, resume="must")
    assert asked is not None
    with pytest.raises(ContinuityBroken) as ended:
        confirm(asked, held("ef01"), lambda: replace(PROBE, optimizer_steps=0))
    said = str(ended.value)
    for words in (str(directory), "digest is ef01, saved was abcd", "0 steps, it had 12", "ckpt_step", "[continuity]"):
        assert words in said
    assert exit_code(ended.value) == ExitCode.RESUME


def test_elsewhere_it_is_a_warning_that_is_hard_to_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    asked = expectation(tmp_path, resume="auto")
    assert asked is not None
    assert len(confirm(asked, held(), lambda: replace(PROBE, optimizer_steps=0))) == 1
    assert "DOES NOT CONTINUE WHERE IT STOPPED" in caplog.text


@pytest.mark.parametrize("resume", ["auto", "must"])
@pytest.mark.parametrize("probe", [PROBE, None])
def test_an_actor_that_is_not_what_was_saved_ends_the_run_unless_that_is_meant(
    tmp_path: Path, resume: str, probe: Probe | None, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, probe)
    asked = expectation(tmp_path, resume=resume)
    assert asked is not None
    with pytest.raises(ContinuityBroken, match="the actor's digest is ef01, saved was abcd"):
        confirm(asked, held("ef01"), lambda: PROBE)
    meant = expectation(tmp_path, resume=resume, allow_mismatch=("continuity",))
    assert meant is not None
    assert confirm(meant, held("ef01"), lambda: PROBE)
    assert "DOES NOT CONTINUE WHERE IT STOPPED" in caplog.text


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_slot_beside_the_actor_that_is_not_what_was_saved_ends_the_run_with_three(
    tmp_path: Path, resume: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    asked = expectation(tmp_path, resume=resume)
    assert asked is not None
    with pytest.raises(ContinuityBroken, match=r"the digest of ref@4 is 0the, saved was re0f") as ended:
        confirm(asked, held(ref="0the"), lambda: PROBE)
    assert exit_code(ended.value) == ExitCode.RESUME
    assert "old_actor" not in str(ended.value)
    with pytest.raises(ContinuityBroken, match="the digest of old_actor@4 is 0the"):
        confirm(asked, held(old_actor="0the"), lambda: PROBE)
    allowed = expectation(tmp_path, resume=resume, allow_mismatch=("continuity",))
    assert allowed is not None
    assert len(confirm(allowed, held(ref="0the"), lambda: PROBE)) == 1
    assert "ref@4" in caplog.text


def test_bytes_of_another_dtype_and_an_optimizer_that_was_not_asked_for_are_not_compared(tmp_path: Path) -> None:
    saved(tmp_path)
    low = expectation(tmp_path, dtype="bfloat16")
    assert low is not None
    assert low.digest is None
    assert confirm(low, held("ef01", ref="0the"), lambda: PROBE) == ()
    alone = expectation(tmp_path, weights_only=True)
    assert alone is not None
    assert (
        confirm(
            alone, held(ref="0the", old_actor="0the"), lambda: replace(PROBE, optimizer_steps=0, moments=(0.0, 0.0))
        )
        == ()
    )


def test_a_probe_that_was_lost_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, probe=None)
    asked, must = expectation(tmp_path), expectation(tmp_path, resume="must")
    assert asked is not None
    assert must is not None
    assert len(confirm(asked, held(), lambda: PROBE)) == 1
    assert "probe.json is missing" in caplog.text
    with pytest.raises(ContinuityBroken, match=r"probe\.json is missing"):
        confirm(must, held(), lambda: PROBE)


def test_a_fresh_start_asks_for_nothing(tmp_path: Path) -> None:
    assert expectation(tmp_path / "absent") is None
