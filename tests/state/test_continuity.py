"""What counts as a jump between a save and a resume, and what as rounding."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from state.continuity import Dtype, Probe, breaks
from state.stored import parse

SAVED = Probe("float32", (-1.0, -2.0, -0.5), (-1.1, -1.9, -0.6), 0.75, 12, (0.3, 0.02))


def shifted(values: tuple[float, ...], by: float) -> tuple[float, ...]:
    return tuple(value + by for value in values)


def test_the_same_and_what_rounding_does_to_it_are_no_jump() -> None:
    rounded = replace(
        SAVED,
        logprobs=shifted(SAVED.logprobs, 1e-6),
        ref_logprobs=shifted(SAVED.ref_logprobs or (), -1e-6),
        grad_norm=SAVED.grad_norm * (1 + 1e-5),
        moments=(0.3 * (1 + 1e-6), 0.02 * (1 - 1e-6)),
    )
    assert breaks(SAVED, SAVED, with_optimizer=True) == ()
    assert breaks(SAVED, rounded, with_optimizer=True) == ()


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (replace(SAVED, logprobs=shifted(SAVED.logprobs, 0.01)), "log-probs of the actor are off by 0.01"),
        (replace(SAVED, logprobs=(math.nan, -2.0, -0.5)), "log-probs of the actor are off by inf"),
        (replace(SAVED, logprobs=(-1.0,), ref_logprobs=None), "log-probs of the actor are off by inf"),
        (replace(SAVED, ref_logprobs=shifted(SAVED.ref_logprobs or (), 0.01)), "log-probs of the reference are off"),
        (replace(SAVED, ref_logprobs=SAVED.logprobs), "KL to the reference is 0, it was 0.00"),
        (replace(SAVED, grad_norm=0.8), "gradient norm on the probe batch is 0.8, it was 0.75"),
        (replace(SAVED, optimizer_steps=0), "taken 0 steps, it had 12"),
        (replace(SAVED, moments=(0.0, 0.02)), "first moments is 0, it was 0.3"),
        (replace(SAVED, moments=(0.3, 0.0)), "second moments is 0, it was 0.02"),
        (replace(SAVED, moments=(0.3, math.nan)), "second moments is nan"),
    ],
)
def test_every_jump_is_told_with_what_it_was(after: Probe, said: str) -> None:
    assert any(said in word for word in breaks(SAVED, after, with_optimizer=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6])
def test_a_small_distance_to_the_reference_that_vanished_is_a_jump(dtype: Dtype, distance: float) -> None:
    saved = replace(SAVED, dtype=dtype, ref_logprobs=shifted(SAVED.logprobs, distance))
    words = breaks(saved, replace(saved, ref_logprobs=saved.logprobs), with_optimizer=True)
    assert any("exactly what the actor does" in word for word in words)


def test_an_actor_that_had_not_left_its_reference_is_no_jump() -> None:
    start = replace(SAVED, ref_logprobs=SAVED.logprobs)
    assert breaks(start, start, with_optimizer=True) == ()


def test_weights_alone_bring_no_optimizer() -> None:
    fresh = replace(SAVED, optimizer_steps=0, moments=(0.0, 0.0))
    assert breaks(SAVED, fresh, with_optimizer=False) == ()


def test_a_reference_that_comes_or_goes_is_no_jump() -> None:
    without = replace(SAVED, ref_logprobs=None)
    assert breaks(SAVED, without, with_optimizer=True) == ()
    assert breaks(without, SAVED, with_optimizer=True) == ()
    assert without.kl_to_ref is None


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_low_precision_is_given_more_room(dtypes: tuple[Dtype, Dtype]) -> None:
    saved = replace(SAVED, dtype=dtypes[0])
    after = replace(saved, dtype=dtypes[1], logprobs=shifted(saved.logprobs, 0.01), grad_norm=0.76)
    assert breaks(saved, after, with_optimizer=True) == ()
    assert breaks(saved, replace(after, logprobs=shifted(saved.logprobs, 0.3)), with_optimizer=True) != ()


def test_the_distance_is_the_mean_of_k3() -> None:
    expected = sum(math.exp(r) - 1 - r for r in (-0.1, 0.1, -0.1)) / 3
    assert SAVED.kl_to_ref == pytest.approx(expected)


def test_it_survives_a_file() -> None:
    for probe in (SAVED, replace(SAVED, ref_logprobs=None)):
        assert parse(Probe, json.dumps(probe.to_json()).encode()) == probe
