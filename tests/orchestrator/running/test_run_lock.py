"""Two drivers never write to one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config import Config
from orchestrator.options.problems import ConfigError
from orchestrator.running.run_lock import LOCK, alone


def config(run_dir: Path, **checkpoint: object) -> Config:
    return Config.model_validate({"run": {"dir": str(run_dir)}, "checkpoint": checkpoint})


def refused(wanted: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said), alone(wanted):
        pass


def test_a_second_driver_is_refused_and_told_whose_the_run_is(tmp_path: Path) -> None:
    with alone(config(tmp_path)):
        refused(config(tmp_path), rf"run\.dir: .* is in use by another run \(process {os.getpid()} on ")
        with alone(config(tmp_path / "another")):
            pass
    with alone(config(tmp_path)):
        pass


def test_two_runs_do_not_save_to_one_directory(tmp_path: Path) -> None:
    shared = {"save": str(tmp_path / "checkpoints"), "save_interval": 1}
    with alone(config(tmp_path / "one", **shared)):
        refused(config(tmp_path / "other", **shared), r"checkpoint\.save: .*checkpoints is in use")


def test_a_killed_driver_keeps_nobody_out(tmp_path: Path) -> None:
    holding = (
        "import sys, pathlib\nfrom orchestrator.config import Config\nfrom orchestrator.running.run_lock import alone\n"
        "with alone(Config.model_validate({'run': {'dir': sys.argv[1]}})):\n    print('held', flush=True)\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "held\n"
        refused(config(tmp_path), f"process {driver.pid} ")
        driver.kill()
    with alone(config(tmp_path)):
        pass


def test_a_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(config(tmp_path / "file"), r"run\.dir: .*cannot be written to")
    ppo = {"algorithm": {"advantage_estimator": "ppo"}, "critic": {"save": str(tmp_path / "file")}}
    asked = config(tmp_path / "run", save_interval=1).model_dump() | ppo
    refused(Config.model_validate(asked), r"critic\.save: .*cannot be written to")


def test_a_lock_that_says_nothing_still_locks(tmp_path: Path) -> None:
    with alone(config(tmp_path)):
        (tmp_path / LOCK).write_text("{")
        refused(config(tmp_path), "in use by another run; wait")
