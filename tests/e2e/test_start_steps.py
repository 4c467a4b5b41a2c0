"""Where a run starts, for every kind of checkpoint: `slotwise train --dry-run --json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Base
from tests.e2e.runs import Place


def resume(place: Place, **checkpoint: Any) -> dict[str, Any]:
    ended = place.run("train", place.config("dry", {"checkpoint": checkpoint}), "--dry-run", "--json")
    assert ended.code == 0, ended.output
    return json.loads(ended.output.splitlines()[-1])["resume"]


def test_native(base: Base, place: Place) -> None:
    assert resume(place, load=str(base.checkpoints)) | {"reason": "", "warnings": []} == {
        "source": "native",
        "path": str(base.checkpoints),
        "iteration": 3,
        "start_rollout_id": 4,
        "load_optimizer": True,
        "load_rng": True,
        "load_data": True,
        "reason": "",
        "warnings": [],
    }


def test_native_at_step_zero(base: Base, place: Place) -> None:
    plan = resume(place, load=str(base.checkpoints), ckpt_step=0)
    assert (plan["iteration"], plan["start_rollout_id"]) == (0, 1)


def test_missing(place: Place) -> None:
    plan = resume(place, load=str(place.path / "nowhere"))
    assert (plan["source"], plan["start_rollout_id"]) == ("fresh", 0)
    assert "nowhere" in plan["warnings"][0]


def test_missing_where_it_must_be_there(place: Place) -> None:
    config = place.config("dry", {"checkpoint": {"load": str(place.path / "nowhere"), "resume": "must"}})
    ended = place.run("train", config, "--dry-run")
    assert ended.code == 3
    assert "nowhere" in ended.output


@pytest.fixture(scope="module")
def huggingface(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the base run as a Hugging Face directory."""
    out = tmp_path_factory.mktemp("converted") / "hf"
    ended = Place(out.parent).run("convert", base.checkpoints, out)
    assert ended.code == 0, ended.output
    return out


@pytest.fixture(scope="module")
def native(huggingface: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, as a native checkpoint."""
    out = tmp_path_factory.mktemp("converted") / "native"
    ended = Place(out.parent).run("convert", huggingface, out)
    assert ended.code == 0, ended.output
    return out


def test_converted_is_a_release_and_starts_at_zero(native: Path, place: Place) -> None:
    assert (native / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    plan = resume(place, load=str(native))
    assert (plan["source"], plan["start_rollout_id"], plan["load_optimizer"]) == ("release", 0, False)


def test_a_huggingface_directory_is_not_a_checkpoint_in_raw_mode(huggingface: Path, place: Place) -> None:
    ended = place.run("train", place.config("dry", {"checkpoint": {"load": str(huggingface)}}), "--dry-run")
    assert ended.code == 3
    assert "slotwise convert" in ended.output


def test_a_release_among_iterations_wins_when_the_tracker_says_so(base: Base, native: Path, place: Place) -> None:
    root = place.path / "both"
    shutil.copytree(base.checkpoints, root)
    shutil.copytree(native / "release", root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")

    plan = resume(place, load=str(root))

    assert (plan["source"], plan["start_rollout_id"]) == ("release", 0)
