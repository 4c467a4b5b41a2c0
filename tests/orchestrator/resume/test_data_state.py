"""What waits in a checkpoint to be trained on is what its run can have made, or is refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.resume.data_state import read, refuse_impossible
from state import saves
from state.errors import ResumeError
from tests.orchestrator.saved_checkpoint import CURSOR, DATA, SAMPLE

VERDICT: dict[str, Any] = {"reward": 1.0, "timed_out": False, "error": None}
GROUP: dict[str, Any] = {
    "at": CURSOR | {"next_group_id": 3}, "samples": [SAMPLE], "judged": [VERDICT], "failed": [], "asked_again": 0,
}  # fmt: skip


def holding(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return DATA | {"groups": list(groups)} | more


def test_what_a_run_makes_is_taken(tmp_path: Path) -> None:
    state = holding(GROUP, unfinished=[CURSOR | {"next_group_id": 4}])
    saves.write_data(tmp_path, state)
    assert read(tmp_path) == state
    refuse_impossible(state, 5, 10, tmp_path)
    refuse_impossible(state, 5, None, tmp_path)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (holding(GROUP | {"samples": [SAMPLE | {"spans": [[1, 4, 0, 2], [1, 5, 1, 2]]}]}), "spans overlap"),
        (holding(GROUP | {"samples": [SAMPLE | {"versions": [[1, 4]]}]}), "weights that versions does not name"),
        (holding(GROUP | {"samples": [SAMPLE | {"versions": [], "spans": []}]}), "which weights wrote it"),
        (
            holding(GROUP | {"samples": [SAMPLE, SAMPLE | {"group_id": 4}], "judged": [VERDICT] * 2}),
            "more than one group",
        ),
        (holding(GROUP | {"judged": [VERDICT] * 2}), "one entry per sample"),
        (holding(GROUP | {"at": CURSOR | {"next_group_id": 2}}), "another group began"),
        (holding(GROUP, GROUP), "waits twice"),
        (holding(GROUP, unfinished=[CURSOR | {"next_group_id": 3}]), "waits twice"),
        (holding(unfinished=[CURSOR | {"fingerprint": "0ther"}]), "more than one data"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    saves.write_data(tmp_path, state)
    with pytest.raises(ResumeError, match=rf"data\.json .*{said}.*checkpoint\.ckpt_step"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("saved_version", "vocab_size", "said"),
    [
        (4, 10, "sample 3/0 is of version 5 of the actor, which was saved at version 4"),
        (5, 9, "sample 3/0 has token 9, and the model has 9"),
    ],
)
def test_what_no_engine_of_the_run_can_have_written_is_refused(
    tmp_path: Path, saved_version: int, vocab_size: int, said: str
) -> None:
    with pytest.raises(ResumeError, match=rf"data\.json: {said}; name another iteration"):
        refuse_impossible(holding(GROUP), saved_version, vocab_size, tmp_path)
