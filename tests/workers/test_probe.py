"""The probe of a gang: the same on every layout, and nothing is changed by taking it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state.continuity import Probe, breaks
from tests.workers.checkpoint_jobs import in_dtype
from tests.workers.gang_processes import run_gang
from tests.workers.train_jobs import Setting, no_distributed_optimizer
from workers.megatron.probe import probe_batch

JOBS = "tests.workers.checkpoint_jobs"
ONE = Setting()


def probed(path: Path, world_size: int, setting: Setting) -> Probe:
    ranks = run_gang(f"{JOBS}:probe_of", world_size, (setting, path))
    assert all(same for _, same in ranks)
    found: list[Probe] = [probe for probe, _ in ranks if probe is not None]
    assert len(found) == (world_size // setting.pp)
    assert all(probe == found[0] for probe in found)
    return found[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "c"
    path.mkdir()
    run_gang(f"{JOBS}:train_and_save", 1, (ONE, path, 2))
    return path


@pytest.fixture(scope="module")
def alone(saved: Path) -> Probe:
    return probed(saved, 1, ONE)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_every_layout_computes_the_same(saved: Path, alone: Probe, sizes: dict[str, int]) -> None:
    found = probed(saved, 2, replace(ONE, **sizes))
    assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
    assert found.moments == pytest.approx(alone.moments, rel=1e-5)
    assert breaks(alone, found, with_optimizer=True) == ()


def test_it_counts_what_the_optimizer_has_done(alone: Probe) -> None:
    assert alone.optimizer_steps == 2
    assert min(alone.moments) > 0


@pytest.mark.parametrize("setting", [ONE, no_distributed_optimizer(ONE)], ids=["distributed", "plain"])
def test_masters_of_a_bfloat16_model_are_probed_too(setting: Setting, tmp_path: Path) -> None:
    low = in_dtype(setting, "bfloat16")
    run_gang(f"{JOBS}:train_and_save", 1, (low, tmp_path, 2))
    one, two = probed(tmp_path, 1, low), probed(tmp_path, 2, replace(low, tp=2))
    assert breaks(replace(one, dtype="bfloat16"), replace(two, dtype="bfloat16"), with_optimizer=True) == ()


def test_the_batch_is_the_same_everywhere_and_fits_the_model() -> None:
    batch = probe_batch(70, 64)
    assert batch == probe_batch(70, 64)
    assert batch[0].prompt_ids + batch[0].response_ids[:3] == (29, 47, 14, 55)
    assert all(0 <= token < 70 for sample in batch for token in sample.prompt_ids + sample.response_ids)
    assert {sample.num_tokens for sample in probe_batch(70, 8)} == {8}
