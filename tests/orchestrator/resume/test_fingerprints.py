"""Continuing with another model, tokenizer or data than the checkpoint was saved with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode
from orchestrator.resume.fingerprints import fingerprints
from tests.orchestrator.saved_checkpoint import saved
from tests.orchestrator.valid_config import VALID

TOKENIZER = Path(__file__).parents[3] / "examples" / "quickstart"
Content = dict[str, Any]


def content(root: Path) -> Content:
    shutil.copytree(TOKENIZER, root / "tokenizer")
    (root / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    value: Content = yaml.safe_load(VALID)
    value["model"]["tokenizer"] = str(root / "tokenizer")
    value["data"] = {"path": str(root / "rows.jsonl")}
    value["checkpoint"] = {"load": str(root / "ckpt")}
    return value


def save(root: Path, value: Content) -> dict[str, str]:
    config = Config.model_validate(value)
    saved(root / "ckpt", 4, config)
    return fingerprints(config)


def dry_run(root: Path, value: Content, *flags: str) -> int:
    (root / "run.yaml").write_text(yaml.safe_dump(value))
    return main(["train", str(root / "run.yaml"), "--dry-run", "--json", *flags])


def test_another_seed_is_named_beside_the_one_that_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = content(tmp_path)
    save(tmp_path, value)
    assert dry_run(tmp_path, value) == ExitCode.DONE
    capsys.readouterr()
    assert dry_run(tmp_path, value, "--run.seed", "7") == ExitCode.RESUME
    said = capsys.readouterr().err
    assert said.index("(run.seed=0)") < said.index(" there, ") < said.index("(run.seed=7)") < said.index(" here")


def another_model(root: Path, value: Content) -> None:
    value["model"]["config"]["rope_theta"] = 5.0


def another_vocabulary(root: Path, value: Content) -> None:
    path = root / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["new"] = 999
    path.write_text(json.dumps(content))


def another_template(root: Path, value: Content) -> None:
    (root / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")


def other_rows(root: Path, value: Content) -> None:
    (root / "rows.jsonl").write_text('{"prompt": "2"}\n{"prompt": "1"}\n')


def another_order(root: Path, value: Content) -> None:
    value["run"]["seed"] = 9


def another_length(root: Path, value: Content) -> None:
    value["data"]["max_prompt_len"] = 3


def a_generator(root: Path, value: Content) -> None:
    value["data"] = {"generator": "largest_digit"}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("model", another_model),
        ("tokenizer", another_vocabulary),
        ("tokenizer", another_template),
        ("data", other_rows),
        ("data", another_order),
        ("data", another_length),
        ("data", a_generator),
    ],
)
def test_another_one_is_refused_with_both_named_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, change: Callable[[Path, Content], None]
) -> None:
    value = content(tmp_path)
    saved = save(tmp_path, value)
    change(tmp_path, value)
    current = fingerprints(Config.model_validate(value))
    assert [key for key in saved if saved[key] != current[key]] == [kind]

    assert dry_run(tmp_path, value) == ExitCode.RESUME
    said = capsys.readouterr().err
    for words in (str(tmp_path / "ckpt" / "iter_0000004"), saved[kind], current[kind], f"allow_mismatch [{kind}]"):
        assert words in said

    assert dry_run(tmp_path, value, "--checkpoint.allow_mismatch", kind) == ExitCode.DONE
    shown, warned = capsys.readouterr()
    plan = json.loads(shown)["resume"]
    assert (plan["iteration"], plan["load_optimizer"], plan["load_data"]) == (4, True, kind == "model")
    assert saved[kind] in warned
    assert current[kind] in warned
    assert ("prompts begin with the first" in warned) == (kind != "model")


def test_to_allow_one_is_not_to_allow_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = content(tmp_path)
    save(tmp_path, value)
    another_model(tmp_path, value)
    other_rows(tmp_path, value)
    assert dry_run(tmp_path, value, "--checkpoint.allow_mismatch", "data") == ExitCode.RESUME
    assert "allow_mismatch [model]" in capsys.readouterr().err


def test_names_and_places_do_not_matter(tmp_path: Path) -> None:
    value = content(tmp_path)
    save(tmp_path, value)
    for key, name in (("data", "path"), ("model", "tokenizer")):
        value[key][name] = str(Path(value[key][name]).rename(tmp_path / f"moved-{name}"))
    settings = tmp_path / "moved-tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"transformers_version": "99"}))
    assert dry_run(tmp_path, value) == ExitCode.DONE


def test_hyper_parameters_and_sizes_of_a_run_may_change(tmp_path: Path) -> None:
    value = content(tmp_path)
    save(tmp_path, value)
    value["train"] |= {"lr": 0.5, "num_workers": 4}
    value["rollout"] |= {"rollout_batch_size": 16}
    assert dry_run(tmp_path, value) == ExitCode.DONE


def test_weights_alone_need_no_data_of_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = content(tmp_path)
    save(tmp_path, value)
    other_rows(tmp_path, value)
    assert dry_run(tmp_path, value, "--checkpoint.weights_only") == ExitCode.DONE
    another_vocabulary(tmp_path, value)
    assert dry_run(tmp_path, value, "--checkpoint.weights_only") == ExitCode.RESUME
    capsys.readouterr()


def test_what_this_machine_cannot_read_is_not_compared(tmp_path: Path) -> None:
    value = content(tmp_path)
    value["model"]["tokenizer"] = "somebody/on-a-hub"
    value["data"]["path"] = str(tmp_path / "absent.jsonl")
    assert set(fingerprints(Config.model_validate(value))) == {"model"}
