"""What docs/operating.md says is so."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from orchestrator import cli
from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.exit_codes import ExitCode
from orchestrator.options.fields import OPTIONS
from tests.deploy.manifests import NAMES, OVERLAYS, REPO

TEXT = (REPO / "docs" / "operating.md").read_text()
COMMANDS = [line.partition("#")[0].partition("|")[0] for line in TEXT.splitlines() if line.startswith("slotwise ")]


def test_every_alert_is_explained_and_no_other() -> None:
    rules = yaml.safe_load((REPO / "deploy" / "prometheus" / "rules.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^### (\w+)$", TEXT, re.MULTILINE) == alerts


def test_every_exit_code_is_explained() -> None:
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)] == [code.value for code in ExitCode]


def test_every_overlay_is_named() -> None:
    assert re.findall(r"^\| `(\w+)` \| (?:a|as|nodes)", TEXT, re.MULTILINE) == list(NAMES)
    assert sorted(NAMES) == sorted(path.parent.name for path in OVERLAYS.glob("*/kustomization.yaml"))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_and_its_options_are_there(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, *arguments = shlex.split(line)
    assert name in cli._COMMANDS
    if name == "train":
        assert main(["train", "--help"]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
    help_text = capsys.readouterr().out
    for flag in (argument for argument in arguments if argument.startswith("--")):
        assert tuple(flag.removeprefix("--").split(".")) in OPTIONS or flag in help_text, flag


def test_every_option_and_file_it_names_is_there() -> None:
    sections = "|".join(Config.model_fields)
    for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)`", TEXT):
        assert tuple(key.split(".")) in OPTIONS or key.endswith((".yaml", ".json", ".jsonl")), key
    for path in re.findall(r"`((?:deploy|docs)/[\w./-]+)`", TEXT):
        assert (REPO / path).exists(), path
