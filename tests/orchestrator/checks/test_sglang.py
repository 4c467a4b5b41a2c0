"""Options of an SGLang server are checked before anything starts, against the server that would get them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.checks import sglang_fields
from orchestrator.checks.configuration import MODEL_TYPES, problems
from tests.orchestrator.valid_config import with_flags
from workers.rollout.sglang_layout import ARCHITECTURES
from workers.rollout.sglang_options import MODELS

OLDER = """
class ServerArgs:
    \"\"\"One class holds them all.\"\"\"
    model_path: A[str, Arg(help="...", aliases=["--model"])]
    tp_size: A[int, "..."] = 1
    mem_fraction_static: A[Optional[float], "..."] = None
    disable_radix_cache: A[bool, "..."] = False
    plain: str = "without help"
"""
NEWER = {
    "server_args.py": "class ServerArgs:\n    def __post_init__(self): ...\n",
    "arg_groups/fields/model.py": "class Model(msgspec.Struct):\n    model_path: A[str, Arg(help='...')]\n",
    "arg_groups/fields/rest.py": (
        "class Rest(msgspec.Struct):\n    tp_size: A[int, 'n'] = 1\n"
        "    mem_fraction_static: A[float | None, 'x'] = None\n"
        "    disable_radix_cache: A[bool, '...'] = False\n    plain: str = ''\n    _hidden: int = 0\n"
    ),
}

WHO_WROTE = "utils/weight_versions.py"


def install(directory: Path, files: dict[str, str]) -> str:
    """A stand-in for SGLang's sources; returns what PYTHONPATH has to be."""
    for name, text in files.items():
        file = directory / "sglang" / "srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (directory / "sglang" / "__init__.py").write_text("raise ImportError('nobody has to import this')")
    return str(directory)


@pytest.fixture(params=["older", "newer"])
def pythonpath(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return install(tmp_path / "site", {"server_args.py": OLDER} if request.param == "older" else NEWER)


def said(tmp_path: Path, pythonpath: str, *flags: str) -> dict[str, str]:
    given = ("--rollout.engine", "sglang", "--rollout.sglang.env", f"{{PYTHONPATH: {pythonpath}}}")
    return {p.key: p.message for p in problems(with_flags(tmp_path, *given, *flags))}


def test_options_of_the_server_are_read_from_its_sources_old_and_new(pythonpath: str) -> None:
    known = sglang_fields.fields(sys.executable, pythonpath)
    assert set(known) == {"model_path", "tp_size", "mem_fraction_static", "disable_radix_cache", "plain"}
    assert known["disable_radix_cache"] == "bool"


def test_an_option_that_the_server_has_passes(tmp_path: Path, pythonpath: str) -> None:
    flags = ("--rollout.sglang.mem_fraction_static", "0.4", "--rollout.sglang.disable_radix_cache", "true")
    assert said(tmp_path, pythonpath, *flags, "--rollout.sglang.tp_size", "2") == {}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mem_fraction", "0.4", "no option 'mem_fraction'; did you mean mem_fraction_static"),
        ("disable_radix_cache", "7", "accepted: bool"),
        ("model_path", "x", "use model.hf_checkpoint or model.config"),
        ("port", "30000", "is set by Slotwise; leave it out"),
        ("tp_size", "3", "3 does not divide num_attention_heads 4"),
        ("tp_size", "0", "expected a whole number of processes, at least 1"),
        ("python", "bin/python", "is relative"),
        ("python", "/absent/python", "/absent/python cannot be run: No such file or directory"),
    ],
)
def test_what_the_server_would_not_take_is_refused(
    tmp_path: Path, pythonpath: str, key: str, value: str, words: str
) -> None:
    assert words in said(tmp_path, pythonpath, f"--rollout.sglang.{key}", value)[f"rollout.sglang.{key}"]


def test_an_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no SGLang" in said(tmp_path, str(tmp_path / "empty"))["rollout.sglang.python"]


def test_sources_of_an_unknown_layout_are_not_guessed_at(tmp_path: Path) -> None:
    pythonpath = install(tmp_path / "site", {"args.py": "x = 1\n"})
    assert "another layout" in said(tmp_path, pythonpath)["rollout.sglang.python"]


def test_the_section_belongs_to_sglang(tmp_path: Path) -> None:
    found = {p.key: p.message for p in problems(with_flags(tmp_path, "--rollout.sglang.tp_size", "2"))}
    assert "rollout.engine is embedded" in found["rollout.sglang"]


def test_every_process_of_an_engine_on_gpus_has_one(tmp_path: Path, pythonpath: str) -> None:
    gpus = ("--rollout.gpus_per_engine", "1", "--train.gpus_per_worker", "1", "--rollout.sglang.tp_size", "2")
    assert "has 2 processes" in said(tmp_path, pythonpath, *gpus)["rollout.gpus_per_engine"]


def test_shared_memory_reaches_engines_of_one_process_alone(tmp_path: Path, pythonpath: str) -> None:
    ipc = ("--weights.transport", "ipc")
    assert said(tmp_path, pythonpath, *ipc) == {}
    assert (
        "use distributed or disk"
        in said(tmp_path, pythonpath, *ipc, "--rollout.sglang.tp_size", "2")["weights.transport"]
    )


RETRACT = ("--rollout.pause_mode", "retract", "--loop.mode", "fully_async", "--algorithm.old_logprobs", "engine")


def test_responses_wait_for_a_publish_only_in_a_server_that_says_who_wrote_what(tmp_path: Path) -> None:
    older, newer = install(tmp_path / "older", NEWER), install(tmp_path / "newer", NEWER | {WHO_WROTE: ""})
    assert said(tmp_path, newer, *RETRACT) == {}
    assert "does not (0.5.23 does)" in said(tmp_path, older, *RETRACT)["rollout.pause_mode"]


@pytest.mark.parametrize(
    ("flag", "value", "key", "words"),
    [
        ("rollout.engine", "embedded", "rollout.pause_mode", "with embedded engines use abort"),
        ("loop.mode", "async", "rollout.pause_mode", "no publish of a loop that is async meets a response"),
        ("algorithm.old_logprobs", "old_actor", "algorithm.old_logprobs", "several weights wrote"),
    ],
)
def test_responses_that_wait_need_a_loop_and_a_ratio_that_take_them(
    tmp_path: Path, flag: str, value: str, key: str, words: str
) -> None:
    newer = install(tmp_path / "newer", NEWER | {WHO_WROTE: ""})
    assert words in said(tmp_path, newer, *RETRACT, f"--{flag}", value)[key]


def test_weights_of_every_model_that_is_trained_can_be_proven_in_a_server() -> None:
    assert set(MODEL_TYPES) == set(MODELS)
    assert set(MODELS.values()) == set(ARCHITECTURES)
