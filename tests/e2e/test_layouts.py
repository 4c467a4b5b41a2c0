"""Tensor and pipeline parallel gangs train and publish as a data parallel one does."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Base
from tests.e2e.runs import Place, journal, lines


@pytest.mark.parametrize(
    "size", ["tensor_model_parallel_size", pytest.param("pipeline_model_parallel_size", marks=pytest.mark.prove)]
)
def test_other_layouts_publish_the_same_first_weights_and_learn_the_same(base: Base, place: Place, size: str) -> None:
    place.train("laid-out", {"train": {size: 2}})

    run_dir = place.path / "laid-out"
    published, expected = (journal(d, "driver", "publish") for d in (run_dir, base.run_dir))
    assert published[0]["tensors"] == expected[0]["tensors"]
    ours, theirs = (lines(d / "metrics.jsonl")[0] for d in (run_dir, base.run_dir))
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
    assert ours["reward/mean"] == theirs["reward/mean"]
    assert place.run("audit", run_dir).code == 0
