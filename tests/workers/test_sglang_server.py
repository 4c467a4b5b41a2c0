"""How a server is started: what it is told, what of the user's environment it keeps, what of ours it can import."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import psutil
import pytest

from workers.rollout import sglang_server
from workers.rollout.scratch import remove_abandoned
from workers.rollout.sglang_options import SglangOptions, flags
from workers.rollout.sglang_server import ServerDied, ServerSpec, SglangServer, command, environment, write_plugin

SPEC = ServerSpec(
    name="run/engine/0",
    model='{"model_type": "qwen3"}',
    tokenizer=None,
    dtype="float32",
    device="cpu",
    max_batch_size=8,
    options=SglangOptions(python=sys.executable),
    log=Path("server.log"),
    start_timeout_s=20.0,
)


def said(spec: ServerSpec, flag: str) -> str:
    words = command(spec, "/model", (20_000, 20_001))
    return words[words.index(flag) + 1]


def test_a_server_starts_with_weights_that_are_no_slots_on_ports_that_are_reserved() -> None:
    assert said(SPEC, "--load-format") == "dummy"
    assert (said(SPEC, "--model-path"), said(SPEC, "--served-model-name")) == ("/model", "run/engine/0")
    assert (said(SPEC, "--host"), said(SPEC, "--port"), said(SPEC, "--nccl-port")) == ("127.0.0.1", "20000", "20001")
    assert "--skip-tokenizer-init" in command(SPEC, "/model", (1, 2))
    assert "--skip-tokenizer-init" not in command(replace(SPEC, tokenizer="/t"), "/model", (1, 2))


def test_without_a_gpu_it_starts_through_ours_and_with_one_directly() -> None:
    assert command(SPEC, "/model", (1, 2))[:3] == [sys.executable, "-m", "workers.rollout.sglang_launch"]
    on_gpu = command(replace(SPEC, device="cuda"), "/model", (1, 2))
    assert on_gpu[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--attention-backend" not in on_gpu


def test_without_a_gpu_a_server_that_has_nothing_to_do_leaves_the_cores_to_others() -> None:
    assert "--sleep-on-idle" in command(SPEC, "/model", (1, 2))
    assert "--sleep-on-idle" not in command(replace(SPEC, device="cuda"), "/model", (1, 2))
    stays_awake = replace(SPEC, options=SglangOptions(server={"sleep_on_idle": False}))
    assert "--sleep-on-idle" not in command(stays_awake, "/model", (1, 2))


def test_the_users_options_reach_the_server_and_win() -> None:
    server = {"attention_backend": "triton", "disable_radix_cache": True, "mem_fraction_static": 0.4, "quiet": False}
    spec = replace(SPEC, options=SglangOptions(tp_size=2, server=server))
    assert (said(spec, "--attention-backend"), said(spec, "--mem-fraction-static")) == ("triton", "0.4")
    assert said(spec, "--tp-size") == "2"
    words = command(spec, "/model", (1, 2))
    assert "--disable-radix-cache" in words
    assert "--quiet" not in words


def test_lists_and_objects_are_written_as_the_command_line_takes_them() -> None:
    assert flags({"cuda_graph_bs": [1, 2], "json_model_override_args": {"a": 1}, "unset": None}) == [
        "--cuda-graph-bs", "1", "2", "--json-model-override-args", '{"a": 1}',
    ]  # fmt: skip


def test_what_the_user_has_set_stays_as_it_is() -> None:
    inherited = {"OMP_NUM_THREADS": "7", "HF_HUB_OFFLINE": "0", "PYTHONPATH": "/theirs", "CUDA_VISIBLE_DEVICES": "3"}
    result = environment(SPEC, inherited, "/plugin")
    assert {k: v for k, v in result.items() if k in inherited} == {**inherited, "PYTHONPATH": "/plugin:/theirs"}
    options = SglangOptions(env={"PYTHONPATH": "/sglang", "OMP_NUM_THREADS": "2"})
    result = environment(replace(SPEC, options=options), inherited, "/plugin")
    assert (result["PYTHONPATH"], result["OMP_NUM_THREADS"]) == ("/plugin:/sglang", "2")


def test_a_choice_of_plug_ins_does_not_leave_out_the_proof() -> None:
    assert environment(SPEC, {"SGLANG_PLUGINS": "theirs"}, "/plugin")["SGLANG_PLUGINS"] == "theirs,slotwise"
    assert "SGLANG_PLUGINS" not in environment(SPEC, {}, "/plugin")


def test_the_plug_in_is_found_by_its_entry_point_and_imports_torch_alone(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    (found,) = [e for d in distributions(path=[str(tmp_path)]) for e in d.entry_points]
    assert (found.group, found.value) == ("sglang.srt.plugins", "workers.rollout.sglang_plugin:register")
    code = (
        "import sys, workers.rollout.sglang_plugin as p; print(p.__file__); "
        "print([n for n in ('ray', 'megatron', 'transformers', 'pydantic', 'numba') if n in sys.modules]); "
        "import state.digest_cpu"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [str(tmp_path / "workers/rollout/sglang_plugin.py"), "[]"], run.stderr
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "state/digest_cuda.py").exists()  # which can only be imported where Triton is


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> list[tuple[int, ...]]:
    """Servers that run `code` instead; the ports that each was given."""
    given: list[tuple[int, ...]] = []

    def instead(spec: ServerSpec, model_path: str, ports: range) -> list[str]:
        given.append(tuple(ports))
        return [sys.executable, "-c", code]

    monkeypatch.setattr(sglang_server, "command", instead)
    return given


def test_a_server_that_does_not_come_up_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stand_in(monkeypatch, "print('no such attention backend'); raise SystemExit(3)")
    with pytest.raises(ServerDied, match=r"(?s)run/engine/0 ended with code 3.*no such attention backend"):
        SglangServer(replace(SPEC, log=tmp_path / "logs" / "server.log"))
    assert len(given) == 1


def test_a_port_that_somebody_took_meanwhile_is_another_attempt_with_other_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stand_in(monkeypatch, "raise SystemExit('[Errno 98] address already in use')")
    with pytest.raises(ServerDied, match="address already in use"):
        SglangServer(replace(SPEC, log=tmp_path / "server.log"))
    assert len(set(given)) == 3


@pytest.mark.parametrize("keeper_dies", [False, True])
def test_nothing_but_the_log_is_left_also_when_the_keeper_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeper_dies: bool
) -> None:
    stand_in(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(SglangServer, "_wait_until_up", lambda server: None)
    server = SglangServer(replace(SPEC, log=tmp_path / "server.log"))
    assert len(list(tmp_path.iterdir())) == 2
    server._scratch._open.close()  # as the kernel does for an owner that dies
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "its keeper uses it"
    if keeper_dies:
        psutil.Process(server.pid).kill()
        assert not server.alive_after(10.0)
    server.stop()
    assert list(tmp_path.iterdir()) == [tmp_path / "server.log"]
    server.stop()


def test_a_server_that_hangs_while_it_starts_is_given_up_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "import time; print('loading', flush=True); time.sleep(600)")
    with pytest.raises(ServerDied, match=r"(?s)was not up after 2 s.*loading"):
        SglangServer(replace(SPEC, log=tmp_path / "server.log", start_timeout_s=2.0))
