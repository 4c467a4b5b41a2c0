"""The doctor tells what is missing, and its exit code whether the quickstart can run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import doctor
from orchestrator.cli import main
from orchestrator.doctor import GIB, Facts, Gpu, can_run, examine

WELL = Facts(
    python=(3, 11, 7),
    packages=dict.fromkeys((*doctor.PACKAGES, *doctor.OPTIONAL), "1.0"),
    torch_error=None,
    torch_cuda=None,
    gpus=(),
    cpus=2,
    memory=8 * GIB,
    disk_free={"/home": 10 * GIB, "/tmp": 10 * GIB},
    shm_free=GIB,
    loopback_error=None,
    busy_ports=(),
)


def without(package: str) -> dict[str, str | None]:
    return dict(WELL.packages) | {package: None}


@pytest.mark.parametrize(
    ("changed", "named", "said"),
    [
        ({"python": (3, 10, 12)}, "python", "3.11 or newer"),
        *(({"packages": without(package)}, package, "not installed") for package in doctor.PACKAGES),
        ({"torch_error": "OSError: libcudart.so"}, "torch", "libcudart.so"),
        ({"memory": GIB}, "memory", "1.0 GiB of the 4 GiB"),
        ({"disk_free": {"/home": 10 * GIB, "/tmp": 5}}, "disk /tmp", "0.0 GiB of the 2 GiB"),
        ({"loopback_error": "no connection over 127.0.0.1: refused"}, "loopback", "refused"),
    ],
)
def test_what_the_quickstart_cannot_do_without_is_missing(changed: dict[str, Any], named: str, said: str) -> None:
    checks = examine(replace(WELL, **changed))
    (bad,) = [check for check in checks if check.level == "missing"]
    assert bad.name == named
    assert said in f"{bad.found} {bad.remedy}"
    assert bad.remedy
    assert not can_run(checks)


@pytest.mark.parametrize(
    ("changed", "named", "said"),
    [
        *(({"packages": without(package)}, package, doctor.OPTIONAL[package]) for package in doctor.OPTIONAL),
        ({"torch_cuda": "13.0"}, "gpu", "sees no GPU"),
        ({"cpus": 1}, "cpus", "slow"),
        ({"shm_free": 64 << 20}, "shm", "--shm-size"),
        ({"shm_free": None}, "shm", "no /dev/shm"),
        ({"busy_ports": (8265,)}, "port", "8265 is in use"),
    ],
)
def test_what_the_quickstart_can_do_without_is_a_note(changed: dict[str, Any], named: str, said: str) -> None:
    checks = examine(replace(WELL, **changed))
    assert any(check.name == named and said in f"{check.found} {check.remedy}" for check in checks)
    assert can_run(checks)


def test_gpus_are_named() -> None:
    facts = replace(WELL, torch_cuda="13.0", gpus=(Gpu("H200", 140 * GIB), Gpu("H200", 140 * GIB)))
    (gpu,) = [check for check in examine(facts) if check.name == "gpu"]
    assert (gpu.level, gpu.found) == ("ok", "2: H200 (140 GiB), H200 (140 GiB)")


def test_this_machine_can_run_the_quickstart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["facts"]["packages"]["ray"] == "2.60.0"
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("This machine can run the quickstart.\n")


def test_the_exit_code_says_when_it_cannot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda directory: replace(WELL, memory=1))
    assert main(["doctor", "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["doctor"]) == 5
    assert "MISSING memory" in capsys.readouterr().out


def test_a_busy_port_is_seen() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert doctor._is_busy(server.getsockname()[1])
