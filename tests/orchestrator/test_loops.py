"""The order of a run's verbs: what is published, waited for, saved and measured when."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.loops import train_loop
from orchestrator.running.interrupts import StopAsked


class Recorded:
    """Writes down every verb. `asked_in`: the verb during which the run is asked to end."""

    def __init__(self, asked_in: str | None = None) -> None:
        self.verbs: list[str] = []
        self._asked_in = asked_in
        self._asked = False

    def __getattr__(self, verb: str) -> Any:
        def do(argument: int | None = None) -> int | None:
            self._do(verb, argument)
            return argument

        return do

    def generate(self, rollout_id: int) -> str:
        self._do("generate", rollout_id)
        return f"rollout {rollout_id}"

    def wait(self, rollout: str) -> None:
        self._do("wait", rollout.split()[1])
        self.may_stop()

    def train(self, rollout: str) -> None:
        self._do("train", rollout.split()[1])

    def may_stop(self) -> None:
        if self._asked:
            self._asked = False
            raise StopAsked("SIGTERM")

    def _do(self, verb: str, argument: Any) -> None:
        self.verbs.append(verb if argument is None else f"{verb} {argument}")
        self._asked |= self.verbs[-1] == self._asked_in


def looped(
    start: int = 0,
    end: int = 3,
    *,
    mode: str = "sync",
    publish_every: int = 1,
    asked_in: str | None = None,
    **more: Any,
) -> list[str]:
    sections = {
        "loop": {"num_rollout": end, "mode": mode, "update_weights_interval": publish_every},
        "checkpoint": {"save_interval": more.get("save")},
        "eval": {"interval": more.get("evaluate")},
    }
    run = Recorded(asked_in)
    if asked_in is None:
        train_loop(run, Config.model_validate(sections), start)
    else:
        with pytest.raises(StopAsked):
            train_loop(run, Config.model_validate(sections), start)
    return run.verbs


def only(verbs: list[str], verb: str) -> list[int]:
    return [int(said.split()[1]) for said in verbs if said.startswith(f"{verb} ")]


def test_a_step_is_generated_trained_reported_saved_published_and_measured() -> None:
    assert looped(0, 1, save=1, evaluate=1) == [
        *("confirm_resume", "publish", "evaluate 0", "generate 0", "wait 0", "train 0", "report 0"),
        *("save 0", "publish", "evaluate 1", "finish_saves"),
    ]


@pytest.mark.parametrize(("start", "saved"), [(0, [1, 3, 4]), (3, [3, 4]), (4, [4])])
def test_the_last_rollout_is_saved_whatever_the_interval_and_wherever_the_run_started(
    start: int, saved: list[int]
) -> None:
    verbs = looped(start, 5, save=2)
    assert only(verbs, "save") == saved
    assert only(verbs, "train") == list(range(start, 5))


def test_a_resumed_run_is_measured_once_before_it_trains() -> None:
    verbs = looped(5, 7, evaluate=10)
    assert verbs[:4] == ["confirm_resume", "publish", "evaluate 5", "generate 5"]
    assert only(verbs, "evaluate") == [5, 7]


def test_a_rollout_is_saved_before_it_is_measured() -> None:
    verbs = looped(0, 4, save=2, evaluate=2)
    assert verbs.index("save 1") < verbs.index("evaluate 2")


def test_only_an_evaluation_is_a_run_too() -> None:
    assert looped(0, 0, evaluate=1) == ["confirm_resume", "publish", "evaluate 0", "finish_saves"]


def test_async_is_one_rollout_ahead_and_never_publishes_or_saves_while_it_is_generated() -> None:
    verbs = looped(0, 3, mode="async", save=1)
    assert verbs == [
        *("confirm_resume", "publish", "generate 0", "wait 0", "generate 1", "train 0", "report 0", "wait 1", "save 0"),
        *("wait 1", "publish", "wait 1", "generate 2", "train 1", "report 1", "wait 2", "save 1"),
        *("wait 2", "publish", "wait 2", "train 2", "report 2", "save 2", "publish", "finish_saves"),
    ]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 2), (0, 5), (4, 5), (5, 5)])
def test_what_is_generated_is_trained_also_at_the_end(mode: str, start: int, end: int) -> None:
    verbs = looped(start, end, mode=mode)
    assert only(verbs, "generate") == only(verbs, "train") == list(range(start, end))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("start", [0, 1, 17])
@pytest.mark.parametrize("publish_every", [1, 2, 3])
def test_every_start_publishes_first_and_then_on_schedule(mode: str, start: int, publish_every: int) -> None:
    verbs = looped(start, start + 6, mode=mode, publish_every=publish_every)
    assert verbs[:2] == ["confirm_resume", "publish"]
    due = [r for r in range(start, start + 6) if (r + 1) % publish_every == 0 or r == start + 5]
    assert verbs.count("publish") == 1 + len(due)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_asked_to_end_while_training_it_saves_that_rollout_and_does_no_more(mode: str) -> None:
    verbs = looped(0, 9, mode=mode, save=5, evaluate=1, asked_in="train 2")
    assert verbs[-4:] == ["train 2", "report 2", "save 2", "finish_saves"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_asked_to_end_while_generating_it_saves_what_is_trained(mode: str) -> None:
    verbs = looped(0, 9, mode=mode, save=5, asked_in="wait 3")
    assert verbs[-2:] == ["save 2", "finish_saves"]
    assert "train 3" not in verbs


def test_what_is_saved_already_is_not_saved_again() -> None:
    verbs = looped(0, 9, save=1, asked_in="wait 3")
    assert only(verbs, "save") == [0, 1, 2]


@pytest.mark.parametrize(("save", "asked_in"), [(None, "train 2"), (5, "wait 0"), (5, "publish")])
def test_where_nothing_is_saved_or_nothing_trained_it_only_ends(save: int | None, asked_in: str) -> None:
    assert only(looped(0, 9, save=save, asked_in=asked_in), "save") == []


def test_what_is_saved_already_is_waited_for_when_asked_to_end() -> None:
    assert looped(0, 9, save=1, asked_in="wait 3")[-1] == "finish_saves"


def test_a_run_that_fails_waits_for_its_last_save() -> None:
    """An evaluation that fails costs no checkpoint, also where that is still being written."""

    class Fails(Recorded):
        def evaluate(self, rollout_id: int) -> None:
            self._do("evaluate", rollout_id)
            if rollout_id == 2:
                raise ZeroDivisionError

    run = Fails()
    sections = {"loop": {"num_rollout": 9}, "checkpoint": {"save_interval": 1}, "eval": {"interval": 1}}
    with pytest.raises(ZeroDivisionError):
        train_loop(run, Config.model_validate(sections), 0)
    assert run.verbs[-2:] == ["evaluate 2", "finish_saves"]


def test_a_save_that_is_lost_with_the_run_is_told_beside_what_ended_it() -> None:
    class Fails(Recorded):
        def train(self, rollout: str) -> None:
            raise ZeroDivisionError

        def finish_saves(self) -> None:
            raise ValueError("actor/1 died")

    with pytest.raises(ZeroDivisionError) as caught:
        train_loop(Fails(), Config.model_validate({"loop": {"num_rollout": 1}}), 0)
    assert caught.value.__notes__ == ["the save that was under way is lost with it: actor/1 died"]
