"""A resume that goes wrong on the way is found out by what the gang computes, before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.gang_processes import run_gang

Found = dict[str, list[str]]

EXPECTED = {
    "another iteration": ("digest", "log-probs of the actor", "KL to the reference", "optimizer has taken 1 steps"),
    "the reference as actor": ("digest", "log-probs of the actor", "KL to the reference is 0", "has taken 0 steps"),
    "the actor as reference": ("log-probs of the reference", "KL to the reference is 0", "exactly what the actor does"),
    "no optimizer": ("has taken 0 steps, it had 2", "first moments is 0", "second moments is 0"),
}


def continued(root: Path, resume: str) -> Found:
    """Two rollouts are trained and saved; then the run is continued once for each sabotage."""
    changes = {"loop": {"num_rollout": 3}, "checkpoint": {"save_interval": 1, "resume": resume}}
    found: Found
    (found,) = run_gang("tests.e2e.resume_jobs:continued_wrongly", 1, (root, changes), time_limit_s=240.0)
    return found


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_every_wrong_resume_is_told_and_is_an_error_where_it_must_be_right(tmp_path: Path, resume: str) -> None:
    found = continued(tmp_path, resume)
    assert found.pop("nothing") == []
    assert found.keys() == EXPECTED.keys()
    for name, said in found.items():
        assert (said[0] == "refused") == (resume == "must" or "digest" in EXPECTED[name])
        for words in EXPECTED[name]:
            assert any(words in one for one in said), (name, words, said)
