"""From a critic's values to advantages and returns: per token, over all ranks alike, and never of another's samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.gang_processes import Place, gloo, run_gang
from tests.workers.train_jobs import make_samples
from workers.algorithms.gae import generalised_advantages, token_rewards
from workers.algorithms.kl import kl_per_token
from workers.batch import Sample
from workers.config import AlgorithmConfig
from workers.megatron.estimates import estimate

PPO = AlgorithmConfig(advantage_estimator="ppo", gamma=0.9, gae_lambda=0.8)
SAMPLES = [replace(sample, reward=float(sample.index)) for sample in make_samples()]
NAN = torch.tensor(torch.nan)
Found = tuple[list[Tensor], list[Tensor]]


def drawn(seed: int) -> list[Tensor]:
    """One number per response token; what stands at masked ones is no number."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.tensor(sample.loss_mask).bool() for sample in SAMPLES]
    return [torch.where(mask, torch.randn(mask.shape, generator=generator), NAN) for mask in masks]


VALUES, BEHAVIOUR, REF = drawn(0), drawn(1), drawn(2)


PLAIN, WITH_KL = PPO, PPO.model_copy(update={"kl_coef": 0.3})
WHITENED = PPO.model_copy(update={"normalize_advantages": True})


def on_ranks(place: Place, algorithms: list[AlgorithmConfig], shares: list[list[int]]) -> list[Found]:
    """For each algorithm advantages and returns of this rank's share."""
    with gloo(place):
        group: Any = dist.group.WORLD
        mine = shares[place.rank]
        samples, values, behaviour, ref = ([of[i] for i in mine] for of in (SAMPLES, VALUES, BEHAVIOUR, REF))
        found = []
        for algorithm in algorithms:
            advantages, targets = estimate(samples, values, behaviour, ref, algorithm, group)  # type: ignore[arg-type]
            found.append((advantages, list(targets.returns)))
        return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Found]:
    """What one rank with all samples finds."""
    (found,) = run_gang(f"{__name__}:on_ranks", 1, ([PLAIN, WITH_KL, WHITENED], [list(range(len(SAMPLES)))]))
    return dict(zip(("plain", "with kl", "whitened"), found, strict=True))


def by_hand(sample: Sample, position: int, coefficient: float) -> Any:
    mask = torch.tensor(sample.loss_mask).bool()
    kl = kl_per_token(BEHAVIOUR[position], REF[position], mask, "k3")
    rewards = token_rewards(float(sample.index), coefficient * kl, mask)
    return generalised_advantages(rewards, VALUES[position], mask, gamma=0.9, gae_lambda=0.8)


@pytest.mark.parametrize(("name", "coefficient"), [("plain", 0.0), ("with kl", 0.3)])
def test_a_kl_joins_the_rewards_token_by_token(alone: dict[str, Found], name: str, coefficient: float) -> None:
    advantages, returns = alone[name]
    for position, sample in enumerate(SAMPLES):
        expected = by_hand(sample, position, coefficient)
        torch.testing.assert_close(advantages[position], expected.advantages)
        torch.testing.assert_close(returns[position], expected.returns)


def test_whitening_is_over_all_ranks_however_samples_are_split_and_leaves_returns_alone(
    alone: dict[str, Found],
) -> None:
    whitened, _ = alone["whitened"]
    counted = torch.cat([a[torch.tensor(s.loss_mask).bool()] for a, s in zip(whitened, SAMPLES, strict=True)])
    assert float(counted.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(counted.std()) == pytest.approx(1.0, abs=1e-5)
    shares = [[0, 3, 5], [1, 2, 4, 6, 7]]
    ranks = run_gang(f"{__name__}:on_ranks", 2, ([WHITENED], shares))
    for mine, ((advantages, returns),) in zip(shares, ranks, strict=True):
        for position, advantage, target in zip(mine, advantages, returns, strict=True):
            torch.testing.assert_close(advantage, whitened[position])
            torch.testing.assert_close(target, by_hand(SAMPLES[position], position, 0.0).returns)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "none were given"),
        (VALUES[:-1], "7 samples have values; this rank has 8"),
        ([*VALUES[:6], VALUES[7], VALUES[6]], r"sample 1/6 has 5 response tokens and values \(2,\)"),
    ],
)
def test_values_of_other_samples_are_refused(values: Any, words: str) -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match=words):
        estimate(SAMPLES, values, BEHAVIOUR, REF, PPO, nobody)
