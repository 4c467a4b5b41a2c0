"""On policy, engine and trainer agree on every token: the importance ratio is 1, at any temperature."""

from __future__ import annotations

import pytest

from tests.workers.gang_processes import run_gang
from tests.workers.parity_jobs import MODEL, MOE
from workers.config import ModelConfig


@pytest.mark.parametrize("model", [MODEL, MOE], ids=["dense", "experts"])
def test_on_policy_ratio_is_one_at_any_temperature(model: ModelConfig) -> None:
    (found,) = run_gang("tests.workers.parity_jobs:ratios", 1, (model, [0.5, 1.0, 2.0]), time_limit_s=120)
    for lowest, highest in found.values():
        assert lowest == pytest.approx(1.0, abs=1e-4)
        assert highest == pytest.approx(1.0, abs=1e-4)
