"""Native checkpoints: a resumed run takes the step that an uninterrupted one takes, on any layout."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from state.errors import ResumeError
from state.resume import LoadSpec
from tests.workers.checkpoint_jobs import in_dtype
from tests.workers.gang_processes import GangFailed, run_gang
from tests.workers.train_jobs import Setting, farthest, no_distributed_optimizer, whole
from workers.megatron.checkpoint import directory
from workers.megatron.foreign_pickles import read_index

JOBS = "tests.workers.checkpoint_jobs"
DECAY = Setting(train=Setting().train.model_copy(update={"lr_decay_style": "linear", "lr_warmup_steps": 1}))
PLAIN = no_distributed_optimizer(DECAY)

Saved = tuple[Path, list[Any]]


def save(path: Path, world_size: int, setting: Setting) -> Saved:
    path.mkdir()
    return path, run_gang(f"{JOBS}:train_and_save", world_size, (setting, path, 2))


@pytest.fixture(scope="module")
def from_dp2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("dp2") / "c", 2, DECAY)


@pytest.fixture(scope="module")
def from_one(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("one") / "c", 1, DECAY)


def weights_after(ranks: list[Any]) -> dict[str, torch.Tensor]:
    return whole([rank[1] for rank in ranks])


def test_the_same_layout_continues_exactly_with_its_random_state(from_dp2: Saved) -> None:
    path, saved = from_dp2
    resumed = run_gang(f"{JOBS}:load_and_train", 2, (DECAY, path, 2))
    assert farthest(weights_after(resumed), weights_after(saved)) == 0.0
    # Each rank goes on with its own numbers.
    assert [rank[2] for rank in resumed] == [rank[2] for rank in saved]
    assert saved[0][2] != saved[1][2]
    assert all(rank[3] for rank in resumed)


@pytest.mark.parametrize(
    ("source", "world_size", "sizes"),
    [("from_one", 2, {"tp": 2}), ("from_one", 2, {"pp": 2}), ("from_one", 2, {}), ("from_dp2", 1, {})],
    ids=["one to tp2", "one to pp2", "one to dp2", "dp2 to one"],
)
def test_another_layout_continues_to_the_same_weights(
    source: str, world_size: int, sizes: dict[str, int], request: pytest.FixtureRequest
) -> None:
    path, saved = request.getfixturevalue(source)
    resumed = run_gang(f"{JOBS}:load_and_train", world_size, (replace(DECAY, **sizes), path, 2))
    assert farthest(weights_after(resumed), weights_after(saved)) < 1e-6
    assert not any(rank[3] for rank in resumed)


def test_the_learning_rate_goes_on_where_it_was(from_dp2: Saved) -> None:
    path, saved = from_dp2
    (resumed,) = run_gang(f"{JOBS}:load_and_train", 1, (DECAY, path, 2))
    assert resumed[0] == saved[0][0][2:]
    assert len(set(saved[0][0])) == 4


def test_hyper_parameters_of_this_run_win_over_those_saved(from_dp2: Saved) -> None:
    path, saved = from_dp2
    faster = replace(DECAY, train=DECAY.train.model_copy(update={"lr": 2 * DECAY.train.lr}))
    (resumed,) = run_gang(f"{JOBS}:load_and_train", 1, (faster, path, 2))
    assert resumed[0] == pytest.approx([2 * lr for lr in saved[0][0][2:]])


def test_random_state_stays_as_seeded_where_it_is_not_asked_for(from_dp2: Saved) -> None:
    path, _ = from_dp2
    resumed = run_gang(f"{JOBS}:load_and_train", 2, (DECAY, path, 2, False))
    assert resumed[0][2] == resumed[1][2]
    assert not resumed[0][3]


def test_the_optimizer_state_matters(from_dp2: Saved) -> None:
    """Otherwise the tests above would not see it missing."""
    path, saved = from_dp2
    cold = whole(run_gang(f"{JOBS}:cold_start", 1, (DECAY, path, 2)))
    assert farthest(cold, weights_after(saved)) > 1e-4


def test_the_plain_optimizer_resumes_too(tmp_path: Path) -> None:
    path, saved = save(tmp_path / "plain", 2, PLAIN)
    resumed = run_gang(f"{JOBS}:load_and_train", 2, (replace(PLAIN, tp=2), path, 2))
    assert farthest(weights_after(resumed), weights_after(saved)) < 1e-6


@pytest.mark.parametrize("setting", [DECAY, PLAIN], ids=["distributed", "plain"])
def test_masters_of_a_bfloat16_model_resume_in_full_precision(setting: Setting, tmp_path: Path) -> None:
    low = in_dtype(setting, "bfloat16")
    path, saved = save(tmp_path / "bf16", 2, low)
    resumed = run_gang(f"{JOBS}:load_and_train", 2, (low, path, 2))
    assert farthest(weights_after(resumed), weights_after(saved)) == 0.0


def test_what_is_written_later_from_a_copy_is_what_was_written_at_once(tmp_path: Path) -> None:
    """Though the gang has trained on meanwhile."""
    now, later = tmp_path / "now", tmp_path / "later"
    now.mkdir()
    later.mkdir()
    setting = replace(in_dtype(DECAY, "bfloat16"), tp=2)
    assert run_gang(f"{JOBS}:save_now_and_from_a_copy", 2, (setting, now, later)) == [0, 0]
    (one, other) = (run_gang(f"{JOBS}:load_and_train", 2, (setting, path, 2)) for path in (now, later))
    assert [rank[:1] + rank[2:4] for rank in one] == [rank[:1] + rank[2:4] for rank in other]
    assert all(rank[3] for rank in other)
    for which in (1, 4):
        assert farthest(whole([rank[which] for rank in other]), whole([rank[which] for rank in one])) == 0.0


def test_weights_alone_load_on_another_layout_and_in_another_dtype(tmp_path: Path) -> None:
    saved = whole(run_gang(f"{JOBS}:save_weights", 1, (DECAY, tmp_path)))
    loaded = whole(run_gang(f"{JOBS}:load_weights", 2, (replace(DECAY, tp=2), tmp_path)))
    assert farthest(loaded, saved) == 0.0
    low = whole(run_gang(f"{JOBS}:load_weights", 1, (in_dtype(DECAY, "bfloat16"), tmp_path)))
    assert farthest(low, {name: tensor.bfloat16() for name, tensor in saved.items()}) == 0.0


def test_weights_load_from_a_checkpoint_with_optimizer(from_dp2: Saved) -> None:
    path, _ = from_dp2
    (resumed,) = run_gang(f"{JOBS}:load_and_train", 1, (DECAY, path, 2))
    assert farthest(whole(run_gang(f"{JOBS}:load_weights", 1, (DECAY, path))), whole([resumed[4]])) == 0.0


def test_damaged_checkpoints_are_refused_with_the_path_and_what_is_missing(from_dp2: Saved, tmp_path: Path) -> None:
    def truncate(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def overwrite_a_tensor(path: Path) -> None:
        index = read_index(path).storage_data
        part = next(part for key, part in index.items() if key.fqn.endswith("embedding.word_embeddings.weight"))
        with (path / part.relative_path).open("r+b") as file:
            file.seek(part.offset)
            file.write(b"x" * part.length)

    damages: dict[str, tuple[Callable[[Path], None], str]] = {
        "data": (lambda p: (p / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        "cut-data": (lambda p: truncate(p / "__0_0.distcp"), "__0_0.distcp has"),
        "index": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
        "cut-index": (lambda p: truncate(p / ".metadata"), ".metadata cannot be read"),
        "common": (lambda p: (p / "common.pt").unlink(), "common.pt is missing"),
        "overwritten": (lambda p: (p / "__0_0.distcp").write_bytes(b"x" * 10**6), "is refused: "),
        "overwritten-tensors": (overwrite_a_tensor, "cannot be read"),
        "cut-common": (lambda p: truncate(p / "common.pt"), "cannot be read"),
        "unfinished": (lambda p: (p / "metadata.json").unlink(), "metadata.json is missing"),
        "nothing": (shutil.rmtree, "metadata.json is missing"),
    }
    for name, (damage, _) in damages.items():
        shutil.copytree(from_dp2[0], tmp_path / name)
        damage(tmp_path / name)
    paths = [tmp_path / name for name in damages]
    for path, message in zip(paths, run_gang(f"{JOBS}:errors_of_loading", 1, (DECAY, paths))[0], strict=True):
        assert message.startswith(f"ResumeError: {path}")
        assert damages[path.name][1] in message


class Payload:
    """Unpickled without care, it makes a directory."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._proof),)


def test_a_checkpoint_of_somebody_else_runs_no_code(from_one: Saved, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    index = read_index(from_one[0])

    def replaced(key: str) -> Path:
        """A copy of the checkpoint with the payload as one of its objects."""
        path = shutil.copytree(from_one[0], tmp_path / key.partition("/")[0])
        data = io.BytesIO()
        torch.save([Payload(proof)], data)
        (path / "other").write_bytes(data.getvalue())
        where = replace(
            index.storage_data[MetadataIndex(key)], relative_path="other", offset=0, length=len(data.getvalue())
        )
        changed = replace(index, storage_data={**index.storage_data, MetadataIndex(key): where})
        (path / ".metadata").write_bytes(pickle.dumps(changed))
        return path

    indexed, common = (shutil.copytree(from_one[0], tmp_path / name) for name in ("indexed", "common"))
    (indexed / ".metadata").write_bytes(pickle.dumps(replace(index, planner_data={"x": Payload(proof)})))
    objects = [key for key, one in index.state_dict_metadata.items() if isinstance(one, BytesStorageMetadata)]
    random_state = next(key for key in objects if key.startswith("rng"))
    weights = next(key for key in objects if "_extra_state" in key)
    unsharded = [key for key in objects if key.startswith("common_state")]
    if unsharded:
        shutil.rmtree(common)
        common = replaced(unsharded[0])
    else:
        torch.save({"x": Payload(proof)}, common / "common.pt")
    paths = [indexed, common, replaced(random_state), replaced(weights)]
    refused = run_gang(f"{JOBS}:errors_of_loading", 1, (DECAY, paths))[0]
    for path, message in zip(paths, refused, strict=True):
        assert message.startswith(f"ResumeError: {path}")
        assert "posix.mkdir" in message
    assert not proof.exists()
    pickle.loads((indexed / ".metadata").read_bytes())
    assert proof.exists(), "the payload does nothing, and would prove nothing"


def test_missing_optimizer_state_and_other_models_are_refused(from_one: Saved, tmp_path: Path) -> None:
    weights_only = tmp_path / "weights"
    weights_only.mkdir()
    run_gang(f"{JOBS}:save_weights", 1, (DECAY, weights_only))
    ((no_optimizer,),) = run_gang(f"{JOBS}:errors_of_loading", 1, (DECAY, [weights_only]))
    assert str(weights_only) in no_optimizer
    assert "checkpoint.weights_only" in no_optimizer
    config = dict(DECAY.model.config or {}, intermediate_size=64)
    other = replace(DECAY, model=DECAY.model.model_copy(update={"config": config}))
    ((other_model,),) = run_gang(f"{JOBS}:errors_of_loading", 1, (other, [from_one[0]]))
    assert f"ResumeError: {from_one[0]} holds another model" in other_model
    assert "linear_fc1" in other_model
    for setting in (PLAIN, in_dtype(PLAIN, "bfloat16")):
        ((other_kind,),) = run_gang(f"{JOBS}:errors_of_loading", 1, (setting, [from_one[0]]))
        assert f"ResumeError: {from_one[0]} holds the optimizer state of DistributedOptimizer" in other_kind
        assert "keep train.use_distributed_optimizer" in other_kind


def test_nothing_is_written_without_a_permit_to_save(tmp_path: Path) -> None:
    with pytest.raises(GangFailed, match="is for publish, not for save"):
        run_gang(f"{JOBS}:save_with", 1, (DECAY, tmp_path, "publish"))
    assert list(tmp_path.iterdir()) == []


def test_directories_of_load_specs(tmp_path: Path) -> None:
    assert directory(LoadSpec(str(tmp_path), 4, "native")) == tmp_path / "iter_0000004"
    assert directory(LoadSpec(str(tmp_path), 4, "native", "slots/ref")) == tmp_path / "iter_0000004" / "slots" / "ref"
    assert directory(LoadSpec(str(tmp_path), None, "release")) == tmp_path / "release"
    with pytest.raises(ResumeError, match="does not name a native checkpoint"):
        directory(LoadSpec(str(tmp_path), None, "native"))
