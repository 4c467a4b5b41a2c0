"""The table of states, its two readings (the running machine and the pure function), and its picture."""

from __future__ import annotations

import pytest
from transitions import MachineError

from state.lifecycle import TABLE, Lifecycle, mermaid, next_state, resident
from state.slots import PRIMARY_SLOTS, Slot

FLAT = ("cold", "loading", "switching", "stepping", "publishing", "saving", "asleep", "poisoned")
STATES = (*FLAT, *(resident(slot) for slot in Slot))
TRIGGERS = tuple(dict.fromkeys(trigger for trigger, _, _ in TABLE))


def at(state: str, primary: Slot) -> Lifecycle:
    life = Lifecycle(primary)
    life._machine.set_state(state, life)
    return life


@pytest.mark.parametrize("primary", PRIMARY_SLOTS)
@pytest.mark.parametrize("state", STATES)
def test_machine_and_function_agree_on_every_move(state: str, primary: Slot) -> None:
    for trigger in TRIGGERS:
        for slot in Slot:
            life, expected = at(state, primary), next_state(state, trigger, slot, primary)
            if expected is None:
                with pytest.raises(MachineError):
                    life.move(trigger, slot)
                assert life.state == state
            else:
                life.move(trigger, slot)
                assert life.state == expected


def ways_out(state: str, primary: Slot = Slot.ACTOR) -> set[str]:
    return {t for t in TRIGGERS if next_state(state, t, Slot.REF, primary) is not None}


def test_what_each_state_leaves_by() -> None:
    anywhere = {"load", "switch", "fail"}
    assert ways_out("cold") == {"load"}
    assert ways_out("loading") == {"loaded", "fail"}
    assert ways_out("switching") == {"switched", "fail"}
    assert ways_out("stepping") == {"commit", "unchanged", "fail"}
    assert ways_out("publishing") == ways_out("saving") == {"done", "fail"}
    assert ways_out("asleep") == {"wake"}
    assert ways_out("poisoned") == {"restore"}
    assert ways_out("resident.actor") == anywhere | {"ready", "step", "publish", "save", "sleep"}
    for slot in (Slot.REF, Slot.TEACHER, Slot.OLD_ACTOR, Slot.CRITIC):
        assert ways_out(resident(slot)) == anywhere


def test_a_critic_trains_and_saves_but_is_never_published() -> None:
    assert ways_out("resident.critic", Slot.CRITIC) >= {"step", "save", "sleep", "ready"}
    assert "publish" not in ways_out("resident.critic", Slot.CRITIC)


def test_publishing_starts_from_the_resident_actor_only() -> None:
    assert [source for trigger, source, _ in TABLE if trigger == "publish"] == ["resident.actor"]


def test_the_picture_shows_every_move() -> None:
    picture = mermaid()
    assert picture.startswith("stateDiagram-v2\n    [*] --> cold\n")
    for trigger, source, destination in TABLE:
        ends = f"    {source.split('.')[0]} --> {destination.split('.')[0]}: "
        (line,) = [line for line in picture.splitlines() if line.startswith(ends)]
        assert trigger in line.removeprefix(ends).split(", ")
