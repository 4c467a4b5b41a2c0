"""The states of a training worker's weights and every way between them. The table is the specification."""

from __future__ import annotations

from typing import Any

from transitions import Machine

from state.slots import PRIMARY_SLOTS, Slot

SEPARATOR = "."


def resident(slot: Slot) -> str:
    return f"resident{SEPARATOR}{slot}"


def holds(state: str, slot: Slot | str) -> bool:
    """Whether the live bytes are those of `slot`, which the last transition was about."""
    return state == f"resident{SEPARATOR}{slot}" or state in ("stepping", "publishing", "saving")


def holds_as_recorded(state: str, slot: Slot | str) -> bool:
    """The same, and nobody changes them."""
    return holds(state, slot) and state != "stepping"


STATES: tuple[str, ...] = (
    "cold",
    "loading",
    *(resident(slot) for slot in Slot),
    "switching",
    "stepping",
    "publishing",
    "saving",
    "asleep",
    "poisoned",
)

# (trigger, source, destination). `{slot}` is the slot that the trigger is about; `{primary}` the worker's primary.
TABLE: tuple[tuple[str, str, str], ...] = (
    ("load", "cold", "loading"),
    ("load", "resident", "loading"),
    ("loaded", "loading", "resident.{slot}"),
    ("fail", "loading", "poisoned"),
    ("switch", "resident", "switching"),
    ("switched", "switching", "resident.{slot}"),
    ("fail", "switching", "poisoned"),
    ("ready", "resident.{primary}", "resident.{primary}"),
    ("fail", "resident", "poisoned"),
    ("step", "resident.{primary}", "stepping"),
    ("commit", "stepping", "resident.{primary}"),
    ("unchanged", "stepping", "resident.{primary}"),
    ("fail", "stepping", "poisoned"),
    ("publish", "resident.actor", "publishing"),
    ("save", "resident.{primary}", "saving"),
    ("done", "publishing", "resident.{primary}"),
    ("done", "saving", "resident.{primary}"),
    ("fail", "publishing", "poisoned"),
    ("fail", "saving", "poisoned"),
    ("sleep", "resident.{primary}", "asleep"),
    ("wake", "asleep", "switching"),
    ("restore", "poisoned", "switching"),
)

# All that may happen inside a borrow, however many slots are lent one inside the other.
WHILE_LENT = ("switch", "switched", "fail")
# What was going on when a worker was poisoned, from which its primary can be restored.
RESTORABLE = ("loading", "switching")


def next_state(state: str, trigger: str, slot: Slot | None, primary: Slot) -> str | None:
    """Where `trigger` leads from `state`, or None if it may not happen there. Pure: the journal is audited with it."""
    for name, source, destination in TABLE:
        if name == trigger and state in _named(source.format(primary=primary, slot=slot)):
            return destination.format(primary=primary, slot=slot)
    return None


def _named(source: str) -> list[str]:
    """The states that a source in the table stands for."""
    return [state for state in STATES if state == source or state.startswith(source + SEPARATOR)]


class Lifecycle:
    """The table as a running machine. Knows names of states only: what a state means is the slot machine's.

    Its states are flat, with dots in their names: a nested machine takes four times as long for each move.
    """

    state: str

    def __init__(self, primary: Slot) -> None:
        self._machine = Machine(
            model=self,
            states=list(STATES),
            initial="cold",
            auto_transitions=False,
            ignore_invalid_triggers=False,
            send_event=True,
            queued=False,
        )
        for trigger, name, destination in TABLE:
            sources: list[Any] = [*_named(name.format(primary=primary))]
            if "{slot}" not in destination:
                self._machine.add_transition(trigger, sources, destination.format(primary=primary))
                continue
            for slot in Slot:
                self._machine.add_transition(trigger, sources, resident(slot), conditions=_about(slot))

    def move(self, trigger: str, slot: Slot) -> None:
        """Fire `trigger`, which is about `slot`. Raises `transitions.MachineError` where it may not happen."""
        self._machine.events[trigger].trigger(self, slot=slot)


def _about(slot: Slot) -> Any:
    def is_about(event: Any) -> bool:
        return bool(event.kwargs["slot"] is slot)

    return is_about


def mermaid() -> str:
    """The machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> cold", "    state resident {"]
    lines += [f"        {slot}" for slot in Slot]
    lines += ["    }"]
    labels: dict[tuple[str, str], list[str]] = {}
    for trigger, source, destination in TABLE:
        ends = (_mermaid_name(source), _mermaid_name(destination))
        labels.setdefault(ends, []).append(trigger)
    primary = " or ".join(PRIMARY_SLOTS)
    lines += [f"    {source} --> {destination}: {', '.join(names)}" for (source, destination), names in labels.items()]
    lines += [f"    note right of resident : step, save, sleep only from the primary ({primary}); publish from actor"]
    return "\n".join(lines) + "\n"


def _mermaid_name(name: str) -> str:
    return name.split(SEPARATOR)[0]
