"""A run that begins with a Hugging Face directory, and leaves some behind that others can begin with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from orchestrator.cli import main
from orchestrator.exit_codes import ExitCode
from state.digest import digest_tensor
from state.gang import fingerprint
from tests.e2e.bridge_jobs import CUT, ROLLOUTS, from_directory
from tests.e2e.in_process_run import Outcome, configuration
from tests.e2e.runs import TINY, journal, merged
from tests.workers.gang_processes import run_gang
from workers.config import ModelConfig
from workers.megatron.model import load_hf_config

QWEN2 = TINY["model"]["config"] | {"model_type": "qwen2"}


@dataclass(frozen=True)
class Bridged:
    root: Path
    did: Outcome
    loaded: dict[str, str]
    findings: list[str]


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Bridged:
    root = tmp_path_factory.mktemp("bridge")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(load_hf_config(ModelConfig(config=QWEN2))).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases too
    model.save_pretrained(root / "base", max_shard_size="4KB")
    (told,) = run_gang("tests.e2e.bridge_jobs:bridged", 1, (root,), time_limit_s=240.0)
    return Bridged(root, *told)


def digest_of(directory: Path) -> str:
    """Of what transformers loads from it."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tensors = [digest_tensor(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return fingerprint(sorted(tensors, key=lambda tensor: tensor.name))


def marker_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "slotwise.json").read_text())


def test_it_begins_with_the_weights_of_the_directory_to_the_bit(bridged: Bridged) -> None:
    assert len(list((bridged.root / "base").glob("*.safetensors"))) > 1
    assert bridged.loaded["base"] == digest_of(bridged.root / "base")


def test_it_continues_from_its_own_checkpoint_and_not_from_the_directory(bridged: Bridged) -> None:
    plan = bridged.did.plan
    assert (plan.source, plan.start_rollout_id, plan.load_optimizer) == ("native", CUT + 1, True)
    assert [step["step"] for step in bridged.did.steps] == list(range(ROLLOUTS))
    assert bridged.did.jumps == []


def test_it_exports_what_transformers_loads_as_the_gang_swore_to_it(bridged: Bridged) -> None:
    exported = sorted(path.name for path in bridged.root.glob("exported-*"))
    assert exported == ["exported-2", "exported-3"]
    assert not list(bridged.root.glob(".*"))
    for name in exported:
        marker = marker_of(bridged.root / name)
        assert marker["version"] == int(name[-1]) + 1
        assert digest_of(bridged.root / name) == marker["digest"]
        tokenizer = Path(TINY["model"]["tokenizer"]) / "tokenizer.json"
        assert (bridged.root / name / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert len({digest_of(bridged.root / name) for name in ("base", *exported)}) == 3


def test_every_export_is_in_the_journals_of_driver_and_ranks_alike(bridged: Bridged) -> None:
    saves = journal(bridged.root / "first", "driver", "save")
    assert [save["publish_id"] for save in saves] == ["save-1-1", "export-2-2", "export-2-3", "save-2-3"]
    assert saves[2]["digest"] == saves[3]["digest"]
    assert bridged.findings == []


def test_another_run_begins_with_an_export(bridged: Bridged) -> None:
    name = f"exported-{ROLLOUTS - 1}"
    assert bridged.loaded[name] == marker_of(bridged.root / name)["digest"]


def dry_run(root: Path, changes: dict[str, object], *flags: str) -> int:
    config = configuration(root / "third", changes).model_dump(mode="json", exclude_unset=True)
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return main(["train", str(root / "config.yaml"), "--dry-run", "--json", *flags])


def test_a_dry_run_says_that_the_mode_decides(bridged: Bridged, capsys: pytest.CaptureFixture[str]) -> None:
    changes = from_directory(bridged.root / "base")
    assert dry_run(bridged.root, changes) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["resume"]["source"], told["resume"]["start_rollout_id"]) == ("fresh", 0)
    base = {"kind": "huggingface", "path": str(bridged.root / "base"), "iteration": None}
    assert told["loads"] == {"actor": base, "ref": base}
    assert dry_run(bridged.root, changes, "--model.megatron_to_hf_mode", "raw") == ExitCode.CONFIG
    assert "slotwise convert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"save_hf": "/tmp/{rollout_id}"}, "set checkpoint.save_hf_interval"),
        ({"save_hf": "/tmp/one", "save_hf_interval": 1}, "put {rollout_id} where"),
    ],
)
def test_where_exports_cannot_go_is_said_at_once(
    bridged: Bridged, capsys: pytest.CaptureFixture[str], given: dict[str, object], says: str
) -> None:
    changes = merged(from_directory(bridged.root / "base"), {"checkpoint": given})
    assert dry_run(bridged.root, changes) == ExitCode.CONFIG
    assert says in capsys.readouterr().err
