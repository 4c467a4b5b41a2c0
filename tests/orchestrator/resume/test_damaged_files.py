"""Whatever a file holds that a command reads back: the error names it, and the exit code is that of its kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.data.source import Cursor
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.options.load import load
from orchestrator.resume import resuming
from orchestrator.resume.data_state import StoredCursor, StoredRollout, StoredSample
from orchestrator.rollouts.buffer import Rollout, rollout_to_json
from orchestrator.running.run_dir import RunDir
from state import checkpoints, saves
from state.continuity import Probe
from state.errors import ResumeError
from state.journal import Journal
from state.resume import LoadSpec, ResumePlan
from state.slots import WeightId
from tests.orchestrator.saved_checkpoint import CURSOR, DATA, saved
from tests.orchestrator.valid_config import write
from tests.state.toy_run import whole_run
from workers.batch import Sample

ROOT = Path(__file__).parents[3]
NO_JSON = (
    b"",
    b"xx",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"[" * 20_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": "\\ud800"}',
)
PROBE = Probe("float32", (-1.0,), (-1.1,), 0.5, 3, (0.1, 0.1))
FRESH = ResumePlan("fresh", LoadSpec.random(), 0, False, False, False, "nothing was saved")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return load(write(tmp_path), ("--checkpoint.load", str(tmp_path / "ckpt")))


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code of a command, and what it said was wrong; it has shown nobody a traceback."""

    def end(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return code, said

    return end


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def with_cursor(**changes: Any) -> bytes:
    return as_json(DATA | {"cursor": CURSOR | changes})


WAITING: dict[str, Any] = {
    "rollout_id": 5,
    "cursor_after": CURSOR,
    "stats": {},
    "samples": [
        {
            "group_id": 0, "index": 0, "prompt_ids": [1], "response_ids": [2], "logprobs": [-0.5], "loss_mask": [1],
            "versions": [[1, 5]], "spans": [[1, 5, 0, 1]], "seed": 1, "finish_reason": "stop", "reward": 1.0,
        }
    ],
}  # fmt: skip


def waiting(**changes: Any) -> bytes:
    return as_json(DATA | {"waiting": [WAITING | {"samples": [WAITING["samples"][0] | changes]}]})


DAMAGED = [
    *(("data.json", content) for content in NO_JSON),
    ("data.json", with_cursor(position=-1)),
    ("data.json", with_cursor(epoch=True)),
    ("data.json", as_json({"cursor": CURSOR})),
    ("data.json", waiting(response_ids=[2, 3])),
    ("data.json", waiting(versions=[[1]])),
    ("data.json", waiting(spans=[[1, 5, 0, 2]])),
    ("data.json", waiting(spans=[[1, 4, 0, 1]])),
    ("data.json", waiting(versions=[], spans=[])),
    ("data.json", waiting(finish_reason="tired")),
    ("data.json", waiting().replace(b"-0.5", b"NaN")),
    ("data.json", waiting(versions=[[1, 6]], spans=[[1, 6, 0, 1]])),
    ("data.json", as_json(DATA | {"waiting": [WAITING, WAITING]})),
    ("data.json", as_json(DATA | {"waiting": [WAITING | {"samples": WAITING["samples"] * 2}]})),
    ("data.json", as_json(DATA | {"waiting": [WAITING | {"cursor_after": CURSOR | {"fingerprint": "0ther"}}]})),
    *(("probe.json", content) for content in NO_JSON),
    ("probe.json", as_json(PROBE.to_json() | {"moments": [1.0]})),
    ("probe.json", as_json(PROBE.to_json() | {"ref_logprobs": [-1.0, -2.0]})),
    *(("slotwise.json", content) for content in NO_JSON),
    ("slotwise.json", as_json({"iteration": 3})),
    ("slotwise.json", as_json({"iteration": 4, "slots": [{"slot": "rref"}]})),
    ("slotwise.json", as_json({"iteration": 4, "fingerprint": ["model"]})),
    *(("../" + checkpoints.TRACKER, content) for content in (b"", b"xx", b"9" * 5000, b"-4", b"\xff")),
]


def test_every_field_that_is_written_of_data_is_typed() -> None:
    cursor = {one.name for one in fields(Cursor)} | {"fingerprint"}
    sample = Sample(0, 0, (1,), (2,), (-0.5,), (1,), (WeightId(1, 5),), 1, "stop", 1.0)
    rollout = rollout_to_json(Rollout(5, (sample,), CURSOR))
    assert set(StoredCursor.model_fields) == cursor
    assert set(StoredRollout.model_fields) == set(rollout)
    assert set(StoredSample.model_fields) == set(rollout["samples"][0])


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_file_of_a_checkpoint_ends_with_three_and_is_named(
    config: Config, tmp_path: Path, ended: Callable[..., tuple[int, str]], name: str, content: bytes
) -> None:
    directory = saved(tmp_path / "ckpt", 4, config)
    saves.write_probe(directory, PROBE)
    flags = ("train", "valid.yaml", "--checkpoint.load", "ckpt", "--dry-run")
    (directory / "data.json").write_bytes(waiting())
    assert ended(*flags)[0] == ExitCode.DONE
    (directory / name).write_bytes(content)
    code, said = ended(*flags)
    assert code == ExitCode.RESUME
    assert Path(name).name in said
    assert "iter_0000004" in said or name.startswith("..")
    assert len(said) < 1000


@pytest.mark.parametrize("name", ["data.json", "probe.json", "slotwise.json", "../" + checkpoints.TRACKER])
def test_a_directory_in_the_place_of_a_file_of_a_checkpoint_ends_with_three(
    config: Config, tmp_path: Path, ended: Callable[..., tuple[int, str]], name: str
) -> None:
    path = saved(tmp_path / "ckpt", 4, config) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    code, said = ended("train", "valid.yaml", "--checkpoint.load", "ckpt", "--dry-run")
    assert (code, Path(name).name in said) == (ExitCode.RESUME, True)


def test_a_whole_iteration_before_a_damaged_one_is_continued_from(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "ckpt", 3, config)
    (saved(tmp_path / "ckpt", 4, config) / "slotwise.json").write_text("{}")
    assert main(["train", "valid.yaml", "--checkpoint.load", "ckpt", "--dry-run", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["resume"]["iteration"] == 3


def test_a_directory_whose_name_only_looks_like_an_iteration_is_not_one(config: Config, tmp_path: Path) -> None:
    directory = saved(tmp_path / "ckpt", 4, config)
    directory.rename(directory.with_name("iter_00000004"))
    inventory = checkpoints.inspect(tmp_path / "ckpt")
    assert (inventory.ours, inventory.foreign) == ((), ("iter_00000004",))


@pytest.mark.parametrize(
    ("lacking", "said", "word"),
    [
        ({"fingerprint": None}, "which model it was saved with", "model"),
        ({"fingerprint": {}}, "which model it was saved with", "model"),
        ({"digest": None}, "what bytes were saved", "continuity"),
        ({"dtype": None}, "what bytes were saved", "continuity"),
        ({"slots": None}, "what bytes were saved", "continuity"),
    ],
)
def test_a_marker_that_does_not_say_what_was_saved_is_believed_only_where_that_is_asked_for(
    config: Config, tmp_path: Path, ended: Callable[..., tuple[int, str]], lacking: Any, said: str, word: str
) -> None:
    saved(tmp_path / "ckpt", 4, config, **lacking)
    flags = ("train", "valid.yaml", "--checkpoint.load", "ckpt", "--dry-run")
    code, error = ended(*flags)
    assert (code, said in error, f"checkpoint.allow_mismatch [{word}]" in error) == (ExitCode.RESUME, True, True)
    code, warning = ended(*flags, "--checkpoint.allow_mismatch", word)
    assert (code, f"which does not say {said}" in warning) == (ExitCode.DONE, True)


# ---- the directory of a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.yaml", "resume.json", "samples.jsonl", "journal/driver.jsonl"])
def test_a_directory_in_the_place_of_a_file_of_the_run_ends_with_two(config: Config, name: str) -> None:
    (resuming.run_dir(config) / name).mkdir(parents=True)
    with pytest.raises(Exception, match="Is a directory") as ended:
        RunDir.open(config, FRESH)
    assert exit_code(ended.value) == ExitCode.CONFIG
    assert "run.dir" in str(ended.value)


@pytest.mark.parametrize("name", ["driver", "actor-0"])
@pytest.mark.parametrize("line", [*NO_JSON, b'{"seq": "1", "kind": "x"}', b'{"seq": 1, "kind": 5}'])
def test_a_journal_that_nobody_could_write_on_ends_with_three_before_anything_starts(
    config: Config, name: str, line: bytes
) -> None:
    path = resuming.run_dir(config) / "journal" / f"{name}.jsonl"
    Journal(path, name).append("created")
    before = path.read_bytes() + line + b"\n"
    path.write_bytes(before)
    with pytest.raises(ResumeError, match=rf"{name}\.jsonl.* is not a journal entry") as ended:
        RunDir.open(config, FRESH)
    assert exit_code(ended.value) == ExitCode.RESUME
    assert path.read_bytes() == before


def test_an_incarnation_that_is_no_number_ends_with_three(config: Config) -> None:
    path = resuming.run_dir(config) / "journal" / "driver.jsonl"
    Journal(path, "driver").append("driver_started", incarnation="one", start_rollout_id=None, pid=1)
    with pytest.raises(ResumeError, match="`incarnation` is 'one'"):
        RunDir.open(config, FRESH)


# ---- configurations and command lines -------------------------------------------------------------------------------

YAML = {
    "nested deep": "run: " + "[" * 500,
    "nested deep in blocks": "\n".join(" " * n + "a:" for n in range(200)),
    "aliases of aliases": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "a number of any length": "run: {seed: " + "9" * 5000 + "}",
    "a number of more than 64 bits": "run: {seed: 9999999999999999999}",
    "a timestamp": "run: {name: !!timestamp 2026-01-01}",
    "bytes": "run: {name: !!binary aGk=}",
    "a tag that lies": "run: {seed: !!int seven}",
    "a truth that is none": "model: {config: {x: !!bool maybe}}",
    "half a character": 'run: {name: "a\\ud800"}',
    "half a character in a key": 'model: {config: {"\\ud800": 1}}',
    "half a character passed through": 'train: {megatron: {x: ["\\ud800"]}}',
    "a NUL": 'checkpoint: {load: "a\\0b"}',
    "a number that is none, passed through": "model: {config: {x: .nan}}",
    "no mapping": "- a",
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML.keys())
def test_yaml_that_no_option_takes_ends_with_two(
    tmp_path: Path, ended: Callable[..., tuple[int, str]], text: str
) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    code, said = ended("train", str(tmp_path / "odd.yaml"), "--dry-run")
    assert code == ExitCode.CONFIG
    assert "odd.yaml" in said
    assert len(said) < 2000


def test_a_directory_is_no_configuration(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    code, said = ended("train", str(tmp_path), "--dry-run")
    assert (code, "Is a directory" in said) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize("flag", [("--run.seed", "9" * 5000), ("--run.name", "a\udcff"), ("--train.lr", "9" * 5000)])
def test_a_flag_that_no_option_takes_ends_with_two(
    config: Config, ended: Callable[..., tuple[int, str]], flag: tuple[str, str]
) -> None:
    code, said = ended("train", "valid.yaml", *flag, "--dry-run")
    assert (code, flag[0] in said) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [content for content in NO_JSON if content != b"{}"])
def test_a_damaged_file_of_a_model_ends_with_two(
    config: Config, tmp_path: Path, ended: Callable[..., tuple[int, str]], name: str, content: bytes
) -> None:
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "qwen3"}')
    flags = ("--model.config", "null", "--model.hf_checkpoint", "tokenizer", "--model.megatron_to_hf_mode", "bridge")
    saved(tmp_path / "ckpt", 4, load("valid.yaml", flags))
    (tmp_path / "tokenizer" / name).write_bytes(content)
    code, said = ended("train", "valid.yaml", *flags, "--checkpoint.load", "ckpt", "--dry-run")
    assert (code, f"{name} " in said) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize("port", ["99999", "-1", "x", "9" * 5000])
def test_a_port_that_is_none_ends_with_two(tmp_path: Path, ended: Callable[..., tuple[int, str]], port: str) -> None:
    code, said = ended("inspect", str(tmp_path), f"--port={port}")
    assert (code, "0 (any free one) to 65535" in said) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize("inside", [(), ("journal",)])
def test_a_directory_without_journals_cannot_be_audited(
    tmp_path: Path, ended: Callable[..., tuple[int, str]], inside: tuple[str, ...]
) -> None:
    tmp_path.joinpath(*inside).mkdir(exist_ok=True)
    for command in (("audit",), *(() if inside else (("inspect",), ("slots", "--run")))):
        code, said = ended(*command, str(tmp_path))
        assert (code, "it is not the directory of a run" in said) == (ExitCode.CONFIG, True)


def test_whoever_stops_reading_is_no_failure_and_a_violation_stays_one(tmp_path: Path) -> None:
    whole_run(tmp_path / "run")
    write(tmp_path)
    commands = {
        "audit run --timeline": 0,
        "audit run --json": 0,
        "slots --run run": 0,
        "diagram": 0,
        "train valid.yaml --dry-run": 0,
        "train valid.yaml --dry-run --json": 0,
        "train --help": 0,
        "audit broken": 4,
    }
    (tmp_path / "broken" / "journal").mkdir(parents=True)
    (tmp_path / "broken" / "journal" / "driver.jsonl").write_text("xx\n")
    for command, code in commands.items():
        reading, writing = os.pipe()
        os.close(reading)
        arguments = [sys.executable, "-m", "orchestrator", *command.split()]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writing)
        assert (done.returncode, "BrokenPipe" in done.stderr) == (code, False), (command, done.stderr)
