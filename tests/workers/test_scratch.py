"""Scratch directories of servers: whoever dies, and however, the next start leaves none behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from workers.rollout.scratch import Scratch

MAKER = """
import subprocess, sys, time
from pathlib import Path
from workers.rollout.scratch import Scratch
made = Scratch(Path(sys.argv[1]))
(made.path / "file").touch()
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[made.lock] if sys.argv[2] == "shared" else [])
print(child.pid, made.path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "a child's too"])
def test_one_whose_users_were_killed_is_removed_by_the_next_start_and_not_before(tmp_path: Path, shared: bool) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path), "shared" if shared else "own"]
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    said = maker.stdout.readline().split()
    child, path = psutil.Process(int(said[0])), Path(said[1])
    try:
        Scratch(tmp_path).remove()
        assert (path / "file").exists(), "it is in use"
        maker.kill()
        maker.wait()
        Scratch(tmp_path).remove()
        assert path.exists() == shared
    finally:
        child.kill()
        psutil.wait_procs([child], timeout=10)
    Scratch(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_one_stays(tmp_path: Path) -> None:
    (tmp_path / "slotwise-sglang-notes").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "slotwise-sglang-link").symlink_to(tmp_path / "elsewhere")
    Scratch(tmp_path).remove()
    assert len(list(tmp_path.iterdir())) == 3
