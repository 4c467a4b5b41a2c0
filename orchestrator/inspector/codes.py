"""What a lane can show, as small numbers. The page has a colour for each name."""

from __future__ import annotations

from collections.abc import Sequence

CODES = (
    "none",
    "cold",
    "loading",
    "switching",
    "actor",
    "ref",
    "teacher",
    "old_actor",
    "critic",
    "stepping",
    "publishing",
    "saving",
    "asleep",
    "poisoned",
    "starting",
    "stale",
    "updating",
    "serving",
    "dead",
)
NONE = 0
BAD = ("poisoned", "dead")
"""One moment of these shows, however much time a column stands for."""
BRIEF = ("ref", "teacher", "old_actor", "loading", "publishing", "saving", "updating", "stale")
"""What happens between the long states, and is looked for."""

_NUMBER = {name: number for number, name in enumerate(CODES)}


def code(state: str) -> int:
    """Of a state of the slot machine or of an engine's life; states that a newer run has are shown as nothing."""
    return _NUMBER.get(state.removeprefix("resident."), NONE)


def numbers(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(_NUMBER[name] for name in names)
