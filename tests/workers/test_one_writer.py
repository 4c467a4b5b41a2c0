"""Whatever a gang writes or tells, one rank does: no two ranks open the same file, and one has the metrics."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from state import checkpoints
from tests.workers.gang_processes import Place, run_gang
from tests.workers.rank_jobs import EVERY, SLOTS, Setting, agreed, publish, rank_of, save, shard

HERE = "tests.workers.test_one_writer"
NO_TEACHER = EVERY.model_copy(update={"use_opd": False})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Did:
    """Files below the root that one rank opened for writing, and whether it had metrics and a probe."""

    wrote: list[str]
    told: tuple[bool, bool]


def writes_and_tells(place: Place, setting: Setting, root: Path) -> Did:
    opened: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            path = Path(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else Path()
            if root in path.parents:
                opened.add(str(path.relative_to(root)))

    sys.addaudithook(hook)
    with rank_of(place, setting) as rank:
        publish(rank, "p0")
        told = rank.train(shard(rank, 0, 0)) is not None, rank.probe() is not None
        save(rank, root, 0)
        (root / "export").mkdir(exist_ok=True)
        rank.export(agreed(rank, "export"), str(root / "export"))
        return Did(sorted(opened), told)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(4, {"tp": 2}, id="tp2dp2", marks=pytest.mark.prove),
        pytest.param(4, {"tp": 2, "pp": 2}, id="tp2pp2", marks=pytest.mark.prove),
    ],
)
def test_no_two_ranks_write_the_same_file_and_one_tells(world_size: int, sizes: dict[str, int], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    setting = Setting(tmp_path / "run", slots=SLOTS[:2], algorithm=NO_TEACHER, **sizes)
    ranks = run_gang(f"{HERE}:writes_and_tells", world_size, (setting, root))
    writers = Counter(path for rank in ranks for path in rank.wrote)
    assert [path for path, number in writers.items() if number > 1] == []
    on_disk = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {"export/config.json", f"{checkpoints.iteration_dir('', 0)}/.metadata"} <= on_disk
    shards = {path for path in on_disk if path.endswith(".distcp")}
    assert len(shards) > world_size
    assert shards <= writers.keys()
    for told in zip(*(rank.told for rank in ranks), strict=True):
        assert told.count(True) == 1
