"""The command from outside: exit codes, what is printed where, and that nothing is started or written too early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator import slots_view
from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode, exit_code
from orchestrator.options.load import load
from orchestrator.options.problems import ConfigError
from orchestrator.running import interrupts
from orchestrator.running.interrupts import Terminated
from state.errors import InvariantViolation, ResumeError, SlotwiseError
from state.resume import ResumePlan
from tests.orchestrator.saved_checkpoint import saved
from tests.orchestrator.valid_config import write

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(write(tmp_path))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, ResumePlan]]:
    """Calls of the run that the command would start; put an error into `raises` to have it raised."""
    calls: list[tuple[Config, ResumePlan]] = []
    install(monkeypatch, lambda config, plan: calls.append((config, plan)))
    return calls


def install(monkeypatch: pytest.MonkeyPatch, train: Callable[[Config, ResumePlan], None]) -> None:
    module = ModuleType("orchestrator.running.run")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orchestrator.running.run", module)
    monkeypatch.setattr(interrupts.signal, "signal", lambda *_: None)


def slotwise(*arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return result, time.monotonic() - began


def checkpoint(root: Path, iteration: int) -> None:
    saved(root, iteration, load("valid.yaml", ()))


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "a misspelt flag": (("--train.lrr", "1"), "did you mean train.lr?"),
    "an abbreviated flag": (("--loop.num", "1"), "did you mean loop.num_rollout?"),
    "an unknown engine": (("--rollout.engine", "vllm"), "accepted: `embedded`"),
    "an unknown loop": (("--loop.mode", "asink"), "accepted: `sync` or `async`"),
    "a value of the wrong type": (("--train.num_workers", "two"), "accepted: a whole number"),
    "a batch that does not divide": (("--train.num_steps_per_rollout", "5"), "valid: 1, 2, 4, 8, 16"),
    "KL without a reference": (("--model.config", "null", "--model.hf_checkpoint", "hf"), "ref.load"),
    "temperature 0 in training": (("--rollout.temperature", "0"), "above 0"),
    "groups of one": (("--rollout.n_samples_per_prompt", "1"), "at least 2"),
}


@pytest.mark.parametrize(("flags", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_starts(
    config: str,
    trained: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: tuple[str, ...],
    said: str,
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", config, *flags]) == ExitCode.CONFIG
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert trained == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["a misspelt flag", "a batch that does not divide", "KL without a reference"])
def test_a_real_process_refuses_within_five_seconds(config: str, tmp_path: Path, name: str) -> None:
    flags, said = BAD[name]
    result, took = slotwise("train", config, *flags, cwd=tmp_path)
    assert (result.returncode, took < 5) == (2, True)
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_misspelt_key_in_the_file_is_named_with_its_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(Path(config).read_text() + "rewards:\n  name: x\n")
    assert main(["train", config, "--train.warmup", "3"]) == ExitCode.CONFIG
    shown = capsys.readouterr().err
    lines = len(Path(config).read_text().splitlines())
    assert f"rewards ({config}:{lines - 1}): there is no such option; did you mean reward?" in shown
    assert "train.warmup (--train.warmup)" in shown


def test_problems_can_be_had_as_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--rollout.temperature", "0", "--dry-run", "--json"]) == ExitCode.CONFIG
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["key"], problem["where"]) == ("rollout.temperature", "--rollout.temperature")


def test_a_dry_run_prints_configuration_and_plan_quickly_and_leaves_no_trace(config: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result, took = slotwise("train", config, "--train.lr", "1e-3", "--dry-run", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert took < 5
    shown = json.loads(result.stdout)
    assert shown["config"]["train"]["lr"] == 1e-3
    assert shown["resume"]["source"] == "fresh"
    assert shown["resume"]["start_rollout_id"] == 0
    assert shown["loads"]["ref"] == {"kind": "random", "path": None, "iteration": None}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_for_people_is_yaml_that_can_be_run_again(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--run.seed", "7", "--dry-run"]) == ExitCode.DONE
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert main(["train", str(again), "--dry-run"]) == ExitCode.DONE
    assert capsys.readouterr().out == again.read_text()


def test_the_same_command_continues_from_what_it_saved(
    config: str, trained: list[tuple[Config, ResumePlan]], tmp_path: Path
) -> None:
    save = ("--checkpoint.save_interval", "2")
    assert main(["train", config, *save]) == ExitCode.DONE
    checkpoint(tmp_path / "runs" / "test" / "checkpoints", 4)
    assert main(["train", config, *save]) == ExitCode.DONE
    first, second = (plan for _, plan in trained)
    assert (first.source, first.start_rollout_id) == ("fresh", 0)
    assert (second.source, second.start_rollout_id) == ("native", 5)
    assert second.path == str(tmp_path / "runs" / "test" / "checkpoints")


@pytest.mark.parametrize(
    ("flags", "said"), [(("--checkpoint.resume", "must"), "absent"), (("--checkpoint.ckpt_step", "0"), "0")]
)
def test_what_cannot_be_resumed_ends_with_three(
    config: str, trained: list[Any], capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["train", config, "--checkpoint.load", "absent", *flags]) == ExitCode.RESUME
    assert said in capsys.readouterr().err
    assert trained == []


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_missing_checkpoint_in_auto_mode_is_a_warning(
    config: str, trained: list[Any], capsys: pytest.CaptureFixture[str], dry: tuple[str, ...]
) -> None:
    assert main(["train", config, "--checkpoint.load", "absent", *dry]) == ExitCode.DONE
    assert "absent does not exist; fresh start" in capsys.readouterr().err
    assert len(trained) == (0 if dry else 1)


@pytest.mark.parametrize(
    ("tracker", "flags", "start"),
    [
        ("4", (), 5),
        ("0\n", (), 1),
        ("4", ("--checkpoint.ckpt_step", "0"), 1),
        ("9", (), 5),
        ("release", (), None),
        ("", (), None),
        ("abc", (), None),
        ("abc", ("--checkpoint.ckpt_step", "4"), 5),
    ],
)
def test_what_the_tracker_holds_decides_or_ends_with_three_naming_the_file(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tracker: str, flags: Any, start: int | None
) -> None:
    for n in (0, 4):
        checkpoint(tmp_path / "ckpt", n)
    file = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    file.write_text(tracker)
    code = main(["train", config, "--checkpoint.load", "ckpt", "--dry-run", "--json", *flags])
    shown = capsys.readouterr()
    if start is None:
        assert code == ExitCode.RESUME
        assert str(file) in shown.err
        assert "complete iterations 0, 4" in shown.err
    else:
        assert code == ExitCode.DONE
        assert json.loads(shown.out)["resume"]["start_rollout_id"] == start


def test_an_explicit_start_wins_where_there_is_no_checkpoint(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--loop.start_rollout_id", "7", "--dry-run", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["resume"]["start_rollout_id"] == 7


def test_a_run_that_began_elsewhere_continues_from_what_it_saved(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "theirs", 9)
    began = ("--checkpoint.load", "theirs", "--checkpoint.save", "ours", "--checkpoint.weights_only")
    for since, flags, expected in [
        (None, (), ("theirs", 9, 0, False)),
        (3, (), ("ours", 3, 4, True)),
        (3, ("--checkpoint.ckpt_step", "9"), ("theirs", 9, 0, False)),
    ]:
        if since is not None:
            checkpoint(tmp_path / "ours", since)
        assert main(["train", config, *began, *flags, "--dry-run", "--json"]) == ExitCode.DONE
        plan = json.loads(capsys.readouterr().out)["resume"]
        found = (Path(plan["path"]).name, plan["iteration"], plan["start_rollout_id"], plan["load_optimizer"])
        assert found == expected
    assert main(["train", config, *began, "--dry-run"]) == ExitCode.DONE
    assert "checkpoint.load is for its first start" in capsys.readouterr().out


def test_nobody_begins_anew_over_what_they_begin_with(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "ours", 3)
    again = ("--checkpoint.save", "ours", "--checkpoint.weights_only", "--dry-run")
    assert main(["train", config, *again]) == ExitCode.DONE  # nothing is saved
    assert main(["train", config, *again, "--checkpoint.save_interval", "1"]) == ExitCode.RESUME
    assert f"Keep checkpoint.load {tmp_path}/ours, and name another checkpoint.save" in capsys.readouterr().err
    instead = ("--checkpoint.load", "ours", "--checkpoint.save", "new", "--checkpoint.weights_only", "--dry-run")
    assert main(["train", config, *instead, "--checkpoint.save_interval", "1"]) == ExitCode.DONE


def test_the_steps_of_actor_and_reference_do_not_mix(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in (0, 3, 4):
        checkpoint(tmp_path / "ckpt", n)
    both = ("--checkpoint.load", "ckpt", "--ref.load", "ckpt", "--dry-run", "--json")
    for flags, actor, ref in [
        ((), 4, 4),
        (("--ref.ckpt_step", "0"), 4, 0),
        (("--checkpoint.ckpt_step", "3"), 3, 4),
        (("--checkpoint.ckpt_step", "0", "--ref.ckpt_step", "3"), 0, 3),
    ]:
        assert main(["train", config, *both, *flags]) == ExitCode.DONE
        shown = json.loads(capsys.readouterr().out)
        assert (shown["loads"]["actor"]["iteration"], shown["loads"]["ref"]["iteration"]) == (actor, ref)
        assert shown["resume"]["start_rollout_id"] == actor + 1


def test_a_reference_that_is_not_there_ends_with_three(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--ref.load", "absent", "--dry-run"]) == ExitCode.RESUME
    assert "ref.load" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "ckpt", 4, load(config, ()), fingerprint={"model": "llama/0"})
    assert main(["train", config, "--checkpoint.load", "ckpt", "--dry-run"]) == ExitCode.RESUME
    shown = capsys.readouterr().err
    assert "llama/0" in shown
    assert "qwen3/" in shown


ENDINGS: list[tuple[BaseException, ExitCode]] = [
    (InvariantViolation("ranks disagree"), ExitCode.INVARIANT),
    (ResumeError("no optimizer state"), ExitCode.RESUME),
    (ConfigError([]), ExitCode.CONFIG),
    (SlotwiseError("worker died"), ExitCode.FAILED),
    (ValueError("unexpected"), ExitCode.FAILED),
    (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    (Terminated("SIGTERM"), ExitCode.INTERRUPTED),
]


@pytest.mark.parametrize(("error", "code"), ENDINGS, ids=lambda value: type(value).__name__)
def test_how_a_run_ends_is_its_exit_code(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: ExitCode,
) -> None:
    def train(config: Config, plan: ResumePlan) -> None:
        raise error

    install(monkeypatch, train)
    assert main(["train", config]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code in (ExitCode.FAILED, ExitCode.INVARIANT))


def test_the_cause_of_a_failure_decides_and_a_hidden_context_does_not() -> None:
    def raised(error: BaseException, cause: BaseException | None, context: BaseException | None) -> BaseException:
        error.__context__, error.__cause__ = context, cause
        if cause is None:
            error.__suppress_context__ = False
        return error

    violation = InvariantViolation("x")
    assert exit_code(raised(RuntimeError(), violation, None)) == ExitCode.INVARIANT
    assert exit_code(raised(RuntimeError(), None, violation)) == ExitCode.INVARIANT
    assert exit_code(raised(RuntimeError(), ValueError(), violation)) == ExitCode.FAILED
    assert exit_code(ExceptionGroup("ranks", [ValueError(), violation])) == ExitCode.INVARIANT
    loop = RuntimeError()
    loop.__context__ = RuntimeError()
    loop.__context__.__context__ = loop
    assert exit_code(loop) == ExitCode.FAILED


def test_sigterm_is_raised_where_finally_can_see_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        interrupts.raise_on_sigterm()
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no command given"),
        (["trian"], "did you mean train?"),
        (["train"], "CONFIG.yaml"),
        (["train", "--dry-run"], "CONFIG.yaml"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["slots", "--jso"], "--jso"),
        (["slots", "--run", "absent"], "absent"),
        (["audit", "absent"], "absent"),
        (["convert", "x"], "OUT"),
    ],
)
def test_a_wrong_command_line_ends_with_two(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


def test_convert_refuses_to_write_into_what_is_there(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "hf", str(Path(config).parent)]) == ExitCode.CONFIG
    assert "already" in capsys.readouterr().err


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.DONE
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out.split()[:2] == ["slotwise", project["version"]]


@pytest.mark.parametrize("half", [("--no-algorithm.use_kl_loss",), ("--algorithm.kl_loss_coef", "0")])
def test_whoever_switches_the_kl_loss_off_by_half_is_told_the_flags_that_do(
    config: str, capsys: pytest.CaptureFixture[str], half: tuple[str, ...]
) -> None:
    assert main(["train", config, *half, "--dry-run"]) == ExitCode.CONFIG
    named = capsys.readouterr().err.rpartition("both flags: ")[2].split()
    assert main(["train", config, *named, "--dry-run", "--json"]) == ExitCode.DONE
    assert "ref" not in json.loads(capsys.readouterr().out)["loads"]


def test_help_and_the_diagram_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.DONE
    assert "130 interrupted" in capsys.readouterr().out
    assert main(["train", "--help"]) == ExitCode.DONE
    assert "--train.lr" in capsys.readouterr().out
    assert main(["diagram"]) == ExitCode.DONE
    assert "stateDiagram-v2" in capsys.readouterr().out


# ---- slots and audit ---------------------------------------------------------------------------------------------

VIEW = {
    "run": "test",
    "source": "live",
    "workers": [
        {
            "worker": f"test/actor/{rank}", "rank": rank, "role": "actor", "slot": "ref", "state": "resident.ref",
            "version": 3, "incarnation": 1, "digest": "0123456789abcdef", "tier": "copy", "since": 90.0,
            "last_transition": "switched",
        }
        for rank in (1, 0)
    ],
    "engines": [{"engine": "engine/0", "state": "STALE", "version": 2, "behind_by": 1}],
}  # fmt: skip


@pytest.fixture
def inspector() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(VIEW if known else {}).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/slots"
        server.shutdown()


@pytest.fixture
def run_dir(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, whose journals say what `VIEW` says."""
    directory = tmp_path / "runs" / "test"
    (directory / "journal").mkdir(parents=True)
    module = ModuleType("state.audit")
    module.journals = lambda run: [run]  # type: ignore[attr-defined]
    module.latest_views = lambda run: {**VIEW, "run": run.name, "source": "journal"}  # type: ignore[attr-defined]
    module.audit = lambda run: SimpleNamespace(  # type: ignore[attr-defined]
        ok=not (run / "bad").exists(), to_json=lambda: {"violations": []}, summary=lambda: "", timeline=lambda: ""
    )
    monkeypatch.setitem(sys.modules, "state.audit", module)
    return directory


def test_slots_asks_the_live_run(run_dir: Path, inspector: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "inspector.json").write_text(json.dumps({"url": inspector, "token": "secret"}))
    for named in ("test", str(run_dir)):
        assert main(["slots", "--run", named, "--json"]) == ExitCode.DONE
        assert json.loads(capsys.readouterr().out) == VIEW


@pytest.mark.parametrize("content", ["", '{"url": "http', "{}", '{"url": "http://127.0.0.1:1/", "token": "x"}', "[]"])
def test_slots_reads_the_journals_when_the_run_does_not_answer(
    run_dir: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (run_dir / "inspector.json").write_text(content)
    assert main(["slots", "--run", "test", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["source"] == "journal"


def test_slots_with_a_wrong_token_reads_the_journals(
    run_dir: Path, inspector: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "inspector.json").write_text(json.dumps({"url": inspector, "token": "other"}))
    assert main(["slots", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["source"] == "journal"


def test_slots_takes_the_run_that_was_used_last(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_dir.parent / "other"
    (other / "journal").mkdir(parents=True)
    os.utime(other, (2e9, 2e9))
    (run_dir.parent / "notes").mkdir()
    os.utime(run_dir.parent / "notes", (4e9, 4e9))
    assert main(["slots", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["run"] == "other"
    (run_dir / "journal" / "actor-0.jsonl").touch()
    os.utime(run_dir / "journal" / "actor-0.jsonl", (3e9, 3e9))
    assert main(["slots", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["run"] == "test"


def test_slots_without_any_run_says_where_it_looked(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slots"]) == ExitCode.CONFIG
    assert "no runs in" in capsys.readouterr().err


def test_the_table_shows_every_rank_in_order_and_every_engine() -> None:
    text = shown(VIEW)
    assert text.index("actor/0") < text.index("actor/1")
    for word in ("resident", "ref", "1.3", "10.0 s", "0123456789ab", "switched", "engine/0", "STALE", "live"):
        assert word in text


def test_the_table_fits_a_terminal_of_80_columns_and_says_what_is_wrong() -> None:
    view = json.loads(json.dumps(VIEW))
    view["workers"][0] |= {"rank": 511, "tier": "device", "slot": "old_actor", "since": -9000.0}
    view["workers"][1] |= {"state": "poisoned", "detail": "while switching: it broke"}
    text = shown(view)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "actor/0: while switching: it broke" in text


def shown(view: Any) -> str:
    from rich.console import Console

    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (closed with the process)
    console.print(slots_view.render(view, now=100.0))
    return console.export_text()


def test_audit_ends_with_four_when_an_invariant_was_violated(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_dir), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {"violations": []}
    (run_dir / "bad").touch()
    assert main(["audit", str(run_dir)]) == ExitCode.INVARIANT
