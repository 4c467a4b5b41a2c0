"""What one slot is loaded from changes nothing about any other load, also when it fails."""

from __future__ import annotations

import json
import shutil

from tests.e2e.conftest import BASE, Base
from tests.e2e.runs import Place, journal, marker


def test_the_steps_of_ref_and_actor_are_their_own(base: Base, place: Place) -> None:
    changes = BASE | {
        "loop": {"num_rollout": 4},
        "ref": {"load": str(base.checkpoints), "ckpt_step": 0, "tier": "device"},
        "checkpoint": {"load": str(base.checkpoints), "ckpt_step": 2},
    }

    place.train("split", changes)

    loads = {
        e["slot"]: e["provenance"]
        for e in journal(place.path / "split", "actor-0", "transition")
        if e["trigger"] == "load"
    }
    assert loads["actor"].endswith("@ 2")
    assert loads["ref"].endswith("@ 0")
    filled = {
        e["slot"]: e["version"]
        for e in journal(place.path / "split", "actor-0", "transition")
        if e["trigger"] == "loaded"
    }
    assert filled == {"actor": 3, "ref": 1}
    assert [e["rollout_id"] for e in journal(place.path / "split", "driver", "trained")] == [3]


def test_a_ref_that_cannot_be_loaded_leaves_no_trace(base: Base, place: Place) -> None:
    damaged = place.path / "damaged"
    shutil.copytree(base.checkpoints, damaged)
    for part in (damaged / "iter_0000000").glob("*.distcp"):
        part.unlink()
    changes = BASE | {
        "train": {"num_workers": 1},
        "ref": {"load": str(damaged), "ckpt_step": 0},
        "checkpoint": {"load": str(base.checkpoints), "save": str(place.path / "saved")},
    }

    ended = place.train("failing", changes, code=3)

    assert "iter_0000000" in ended.output
    dry = place.run("train", place.config("failing", changes | {"ref": {}}), "--dry-run", "--json")
    resume = json.loads(dry.output)["resume"]
    assert (resume["iteration"], resume["start_rollout_id"]) == (3, 4)
    assert marker(base.checkpoints, 3)["iteration"] == 3
