"""The first failure surfaces at once, and so does a death among those that nothing was asked of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from orchestrator import waiting
from orchestrator.waiting import WorkerFailed, gather
from state.errors import InvariantViolation


class Calls:
    """Stands for Ray: calls by name, those that have ended with what they answer."""

    def __init__(self, **ended: Any) -> None:
        self.ended = ended

    def wait(self, refs: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if ref in self.ended][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str) -> Any:
        if isinstance(self.ended[ref], Exception):
            raise self.ended[ref]
        return self.ended[ref]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda **ended: monkeypatch.setattr(waiting, "ray", Calls(**ended))


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("train", "the traceback", error)


def test_answers_come_by_name_whatever_their_order(ray: Callable[..., None]) -> None:
    ray(b=2, a=1)
    assert gather({"actor/0": "a", "actor/1": "b"}, "train", 1.0, {"actor/2": "line"}) == {"actor/0": 1, "actor/1": 2}


def test_the_first_failure_names_its_actor_and_what_it_was_to_do(ray: Callable[..., None]) -> None:
    ray(b=raised(KeyError("x")))
    with pytest.raises(WorkerFailed, match="actor/1 failed to train:") as failed:
        gather({"actor/0": "a", "actor/1": "b"}, "train", 1.0)
    assert (failed.value.workers, failed.value.kind) == (("actor/1",), "KeyError when it was to train")


def test_a_death_beside_the_call_ends_the_wait(ray: Callable[..., None]) -> None:
    ray(line=ActorDiedError())
    with pytest.raises(WorkerFailed, match="actor/1 died while it was to wait while others were to generate") as died:
        gather({"the rollout manager": "a"}, "generate", 1.0, {"actor/0": "other line", "actor/1": "line"})
    assert died.value.workers == ("actor/1",)


def test_an_answer_that_is_there_counts_whoever_died(ray: Callable[..., None]) -> None:
    ray(line=ActorDiedError(), a=1)
    assert gather({"the rollout manager": "a"}, "generate", 1.0, {"actor/1": "line"}) == {"the rollout manager": 1}


def test_a_violation_is_raised_as_itself(ray: Callable[..., None]) -> None:
    ray(a=raised(InvariantViolation("other bytes")))
    with pytest.raises(InvariantViolation, match="other bytes"):
        gather({"actor/0": "a"}, "publish", 1.0)


def test_whoever_does_not_answer_is_named(ray: Callable[..., None]) -> None:
    ray(a=1)
    with pytest.raises(WorkerFailed, match="train: no answer within 1 s from actor/1") as late:
        gather({"actor/0": "a", "actor/1": "b"}, "train", 1.0)
    assert late.value.workers == ("actor/1",)
