"""Two gangs in one run's journal of the driver: each is held against itself, and neither against the other."""

from __future__ import annotations

from typing import Any

import pytest

from state.findings import JournalFile, Notes
from state.replay_driver import replay_driver

PLAN = {"source": "fresh", "path": None, "iteration": None, "start_rollout_id": 0, "load_optimizer": False}


def entries(*kinds: tuple[str, dict[str, Any]]) -> JournalFile:
    numbered = [
        {"seq": n, "kind": kind, "at": 0.0, "incarnation": 1} | fields for n, (kind, fields) in enumerate(kinds)
    ]
    return JournalFile("driver.jsonl", tuple(numbered), False)


def started(role: str) -> tuple[str, dict[str, Any]]:
    return "gang_started", {"role": role, "world_size": 1, "config_hash": "c", "resume": PLAN}


def saved(kind: str, role: str, iteration: int, **more: Any) -> tuple[str, dict[str, Any]]:
    about = {"role": role, "publish_id": f"save-{role}-{iteration}", "iteration": iteration, "version": iteration + 1}
    about |= {"digest": f"{role}{iteration}", "transitions": [4], "summaries": ["s"], "slots": [], "path": "p"}
    return kind, about | more


BEGAN = (("driver_started", {"pid": 1, "start_rollout_id": None}), started("actor"), started("critic"))


def wrong(*more: tuple[str, dict[str, Any]]) -> list[str]:
    notes = Notes()
    replay_driver(entries(*BEGAN, *more), notes)
    return [finding.what for finding in notes.findings]


@pytest.mark.parametrize("kinds", [("save",), ("save_begun", "save")])
def test_saves_of_one_version_of_two_roles_are_no_contradiction(kinds: tuple[str, ...]) -> None:
    of_both = [saved(kind, role, 0) for kind in kinds for role in ("critic", "actor")]
    assert wrong(*of_both) == []


def test_one_role_is_held_to_its_own_digest_and_to_one_save_at_a_time() -> None:
    again = saved("save", "critic", 0, publish_id="again", digest="other")
    assert wrong(saved("save", "critic", 0), again) == ["again names 1.1 with digest other; before it was critic0"]
    two = (saved("save_begun", "critic", 0), saved("save_begun", "critic", 1))
    assert wrong(*two) == ["save-critic-1 was begun while save-critic-0 was not complete"]


def test_a_save_of_a_role_that_had_not_started_is_found() -> None:
    assert wrong(saved("save", "judge", 0)) == ["save-judge-0 came before the gang had started"]
