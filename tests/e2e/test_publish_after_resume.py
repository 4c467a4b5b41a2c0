"""The first publish of a resumed run carries the resumed actor, although the reference was loaded last."""

from __future__ import annotations

from tests.e2e.conftest import Base
from tests.e2e.runs import Place, journal, marker

ASYNC = {"loop": {"mode": "async", "num_rollout": 5}, "algorithm": {"old_logprobs": "engine"}}


def continued(base: Base, name: str, **changes: object) -> dict[str, object]:
    return {"checkpoint": {"load": str(base.checkpoints), "resume": "must"}} | ASYNC | changes


def skip_last_act_of_init(rank: object) -> None:
    """A set-up hook: init ends without making the primary resident."""
    rank.finish_init = lambda: None  # type: ignore[attr-defined]


def test_first_publish_is_the_resumed_actor(base: Base, place: Place) -> None:
    saved = marker(base.checkpoints, 3)

    place.train("resumed", continued(base, "resumed"))

    first, *_ = journal(place.path / "resumed", "driver", "publish")
    assert (first["outcome"], first["slot"], first["version"]) == ("committed", "actor", 4)
    assert first["tensors"] == saved["tensors"]
    loads = [e for e in journal(place.path / "resumed", "actor-0", "transition") if e["trigger"] == "loaded"]
    assert [e["slot"] for e in loads] == ["actor", "ref"]
    assert loads[0]["digest"] != loads[1]["digest"]


def test_without_the_last_act_of_init_the_gang_does_not_agree_and_no_engine_is_touched(
    base: Base, place: Place
) -> None:
    hook = {"train": {"setup_hook": f"{__name__}:skip_last_act_of_init", "num_workers": 1}}

    ended = place.train("sabotaged", continued(base, "sabotaged", **hook), code=4)

    assert "the gang does not agree" in ended.output
    assert "rank 0 is in state resident.ref" in ended.output
    assert journal(place.path / "sabotaged", "driver", "publish") == []
    assert "begin_update" not in {e["trigger"] for e in journal(place.path / "sabotaged", "fleet", "engine")}
