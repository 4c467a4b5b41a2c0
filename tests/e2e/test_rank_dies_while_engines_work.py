"""A rank that dies while nothing is asked of it is noticed at once, not when the engines are done."""

from __future__ import annotations

import pytest

from tests.e2e.deadly_rewards import MINUTES_S
from tests.e2e.runs import Place, journal, merged

DEADLY = {
    "loop": {"num_rollout": 3},
    "checkpoint": {"save_interval": 1},
    "reward": {"name": "tests.e2e.deadly_rewards:of_a_rank", "timeout_s": 2 * MINUTES_S},
}


@pytest.mark.prove
def test_what_is_being_generated_is_given_up_and_made_again_for_the_next_gang(place: Place) -> None:
    run_dir = place.path / "dies"
    place.train("untouched", merged(DEADLY, {"reward": {"name": "largest_digit"}}))
    ended = place.run("train", place.config("dies", DEADLY), timeout_s=MINUTES_S)
    assert ended.code == 0, ended.output
    (failed,) = journal(run_dir, "driver", "gang_failed")
    published = [e for e in journal(run_dir, "driver", "publish") if e["version"] == 1]
    assert failed["at"] - published[0]["at"] < MINUTES_S / 4
    assert list(failed["ranks"]) == ["actor/1"]
    assert [e["incarnation"] for e in published] == [1, 2]
    saves = [
        {e["iteration"]: e["digest"] for e in journal(d, "driver", "save")} for d in (run_dir, place.path / "untouched")
    ]
    assert saves[0] == saves[1]
    assert place.run("audit", run_dir).code == 0
