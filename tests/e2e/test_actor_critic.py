"""PPO: an actor and a critic, each a gang of its own, in a real run; stopped and continued they are what they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli import main
from orchestrator.inspector.history import History
from orchestrator.inspector.telling import summary
from orchestrator.slots_view import read
from state import checkpoints
from tests.e2e.resume_jobs import Pair
from tests.e2e.runs import Place, journal, lines
from tests.faults.hooks import ENVIRONMENT, RANK_HOOK, Fault, write
from tests.state.journal_edits import drop, edit, entries, find, findings, update
from tests.state.journal_edits import write as write_entries
from tests.workers.gang_processes import run_gang

ROLLOUTS = 3
PPO: dict[str, Any] = {
    "loop": {"num_rollout": ROLLOUTS},
    "algorithm": {
        "advantage_estimator": "ppo", "gae_lambda": 0.95, "normalize_advantages": True, "kl_coef": 0.01,
    },
    "critic": {"lr": 0.01, "lr_warmup_steps": 1, "value_clip": 0.5},
    "checkpoint": {"save_interval": 1},
}  # fmt: skip
NAMES = ["actor/0", "critic/0"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a rank of the critic dies in the second rollout."""
    place = Place(tmp_path_factory.mktemp("ppo"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(place.path / "faults.json"))
        write([Fault("critic/0", "step", "after", "kill", nth=2)], place.path / "faults.json")
        checkpoint = {"save_interval": 1, "save": str(place.path / "saved")}
        place.train("ppo", PPO | {"train": {"num_workers": 1, "setup_hook": RANK_HOOK}, "checkpoint": checkpoint})
    return place.path / "ppo"


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """To be damaged. Its checkpoints are where the run made them."""
    return Path(shutil.copytree(run_dir, tmp_path / "ppo"))


def test_both_gangs_are_built_anew_after_a_rank_of_the_critic_died_and_continue_from_one_save(run_dir: Path) -> None:
    (failed,) = journal(run_dir, "driver", "gang_failed")
    assert "critic/0" in failed["ranks"]
    starts = [
        (e["role"], e["incarnation"], e["resume"]["iteration"]) for e in journal(run_dir, "driver", "gang_started")
    ]
    assert starts == [("actor", 1, None), ("critic", 1, None), ("actor", 2, 0), ("critic", 2, 0)]
    (continuity,) = journal(run_dir, "driver", "continuity")
    assert (continuity["jumps"], sorted(continuity["held"])) == ([], ["actor", "critic"])


def test_it_keeps_every_promise_and_each_role_is_saved_after_every_rollout_in_a_directory_of_its_own(
    run_dir: Path,
) -> None:
    assert findings(run_dir) == []
    assert [entry["role"] for entry in journal(run_dir, "driver", "save")] == ["critic", "actor"] * ROLLOUTS
    for root in (run_dir.parent / "saved", run_dir.parent / "saved-critic"):
        found = checkpoints.inspect(root)
        assert (found.tracker, found.ours) == (f"{ROLLOUTS - 1}\n", tuple(range(ROLLOUTS)))
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["critic"]["save"] is None, "what was derived for the critic is not written back"


def test_metrics_tell_of_both(run_dir: Path) -> None:
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(ROLLOUTS))
    for step in steps:
        assert step.keys() >= {
            "critic/loss",
            "critic/explained_variance",
            "critic/lr",
            "critic/grad_norm",
            "train/loss",
        }
    assert [step["critic/lr"] for step in steps] == pytest.approx([0.005, 0.01, 0.01])
    assert {step["train/lr"] for step in steps} == {3e-3}


def test_slots_shows_the_ranks_of_both(run_dir: Path) -> None:
    rows = read(run_dir)["workers"]
    assert [f"{row['role']}/{row['rank']}" for row in rows] == NAMES
    assert [row["slot"] for row in rows] == ["actor", "critic"]
    assert {row["version"] for row in rows} == {ROLLOUTS}
    page = History(run_dir)
    page.refresh()
    assert [lane.name for lane in page.lanes if lane.kind == "rank"] == NAMES
    assert summary(page, 0.0)["saves"] == ROLLOUTS


def forget_a_commit(copy: Path) -> None:
    drop(copy, "critic-0", {"kind": "transition", "trigger": "commit", "rollout_id": 2})


def save_other_bytes(copy: Path) -> None:
    edit(copy, "driver", update(summaries=["f" * 16]), kind="save", publish_id="save-critic-2-2")


def publish_values(copy: Path) -> None:
    steps = entries(copy, "critic-0")
    saved = find(steps, trigger="save", publish_id="save-critic-2-2")
    done = find(steps, trigger="done", publish_id="save-critic-2-2")
    as_publish = {"publish_id": "publish-2-9"}
    ways = [
        saved | as_publish | {"trigger": "publish", "after": "publishing"},
        done | as_publish | {"before": "publishing"},
    ]
    write_entries(copy, "critic-0", [*steps, *ways])


def resume_otherwise(copy: Path) -> None:
    lines = entries(copy, "driver")
    find(lines, kind="continuity")["held"]["critic"] = "f" * 16
    write_entries(copy, "driver", lines, renumber=False)


@pytest.mark.parametrize(
    ("forge", "what"),
    [
        (forget_a_commit, "critic/0 has no commit of rollout 2"),
        (save_other_bytes, "save-critic-2-2"),
        (publish_values, "publish critic"),
        (resume_otherwise, "holds critic with digest ffffffffffffffff"),
    ],
)
def test_the_audit_holds_the_critic_to_the_same_promises(copy: Path, forge: Callable[[Path], None], what: str) -> None:
    forge(copy)
    said = findings(copy)
    assert any(what in one for one in said), said


def test_without_the_critics_newest_save_either_role_and_step_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("saved", "saved-critic"):
        shutil.copytree(run_dir.parent / name, tmp_path / name)
    shutil.rmtree(tmp_path / "saved-critic" / f"iter_{ROLLOUTS - 1:07d}")
    place = Place(tmp_path)
    config = place.config("ppo", PPO | {"checkpoint": {"save_interval": 1, "save": str(tmp_path / "saved")}})
    asked = ["train", str(config), "--dry-run", "--json"]
    assert main(asked) == 0
    told = capsys.readouterr()
    assert f"the actor's newest in {tmp_path}/saved is iteration 2, the critic's newest" in told.err
    plan = json.loads(told.out)
    assert (plan["resume"]["iteration"], plan["resume"]["critic"]["iteration"], plan["loads"]["critic"]["path"]) == (
        1, 1, f"{tmp_path}/saved-critic",
    )  # fmt: skip
    assert main(asked[:-1]) == 0
    assert f"# critic: iteration 1 of {tmp_path}/saved-critic\n" in capsys.readouterr().out
    assert main([*asked, "--checkpoint.resume", "must"]) == 3
    refused = capsys.readouterr()
    assert "saved-critic is iteration 1" in refused.out + refused.err


# ---- stopped and continued


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair, str]:
    root = tmp_path_factory.mktemp("pairs")
    (found,) = run_gang("tests.e2e.resume_jobs:actor_and_critic", 1, (root, PPO), time_limit_s=120.0)
    return found


def test_continued_both_roles_end_as_if_never_stopped(pairs: tuple[Pair, Pair, str]) -> None:
    whole, continued, _ = pairs
    same = ("train/loss", "train/lr", "reward/mean", "critic/loss", "critic/lr", "critic/explained_variance")
    expected = [[step[key] for key in same] for step in whole.did.steps]
    assert len({tuple(step) for step in expected}) == ROLLOUTS
    assert [[step[key] for key in same] for step in continued.did.steps] == expected
    assert continued.final == whole.final
    assert (continued.did.jumps, continued.did.plan.start_rollout_id) == ([], 1)
    assert whole.final[0].keys() != whole.final[1].keys(), "a critic has a value head"


def test_another_critic_than_was_saved_ends_the_run_and_is_named(pairs: tuple[Pair, Pair, str]) -> None:
    said = pairs[2]
    assert "checkpoints-critic" in said
    assert "the critic's digest is" in said
    assert "values of the critic are off by" in said
