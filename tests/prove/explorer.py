"""Depth first through everything that can be asked and everything that can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.prove.toy_world import Bounds, Call, Snapshot, World

Edge = tuple[tuple[str, ...], Call, str]
"""Where the ranks were, what was asked of whom, and the fault on the way ("" for none)."""


@dataclass
class Coverage:
    """`states` by all that matters in them, `edges` by where, what and which fault, `runs` of calls, failing or not."""

    states: int = 0
    edges: set[Edge] = field(default_factory=set)
    runs: int = 0
    faults: int = 0
    interleavings: int = 0

    def add(self, other: Coverage) -> None:
        self.states += other.states
        self.edges |= other.edges
        self.runs += other.runs
        self.faults += other.faults
        self.interleavings += other.interleavings

    def __str__(self) -> str:
        return (
            f"{self.states} states, {len(self.edges)} edges, {self.runs} calls, {self.faults} faults injected, "
            f"{self.interleavings} interleavings"
        )


class Broken(AssertionError):
    """An invariant does not hold; the message has the calls that led there."""


def closure(bounds: Bounds, faults: int = 1) -> Coverage:
    """Every state that can be reached by the calls that the bounds follow, with at most so many faults on the way; and
    from each of them every other call there is. Ends when none is left."""
    world, covered = World(bounds), Coverage()
    seen = {world.key(): faults}
    stack: list[tuple[Snapshot, int, tuple[str, ...]]] = [(world.snapshot(), faults, ())]
    while stack:
        snapshot, left, path = stack.pop()
        world.restore(snapshot)
        place, calls = world.place(), list(world.calls())
        for call in calls:
            follow, points, number = bounds.follows(call), [""], 0
            while number < len(points):
                fault = number - 1 if number else None
                step = (*path, f"{call}{' failing at ' + points[number] if number else ''}")
                world.restore(snapshot)
                passed = run(world, call, fault, step)
                if fault is None and left and follow:
                    points += passed
                covered.edges.add((place, call, points[number]))
                covered.runs += 1
                covered.faults += fault is not None
                key, remain = world.key(), left - (fault is not None)
                if follow and seen.get(key, -1) < remain:
                    seen[key] = remain
                    stack.append((world.snapshot(), remain, step))
                number += 1
    covered.states = len(seen)
    return covered


def interleavings(bounds: Bounds, length: int) -> Coverage:
    """Every sequence of calls up to this length, each run by itself from the start; none goes on after a refusal."""
    world, covered = World(bounds), Coverage()
    stack: list[tuple[Snapshot, tuple[str, ...]]] = [(world.snapshot(), ())]
    while stack:
        snapshot, path = stack.pop()
        world.restore(snapshot)
        before, place, calls = world.key(), world.place(), [c for c in world.calls() if bounds.follows(c)]
        for call in calls:
            world.restore(snapshot)
            step = (*path, str(call))
            run(world, call, None, step)
            covered.interleavings += 1
            covered.edges.add((place, call, ""))
            if len(step) < length and world.key() != before:
                stack.append((world.snapshot(), step))
    covered.runs = covered.interleavings
    return covered


def run(world: World, call: Call, fault: int | None, path: tuple[str, ...]) -> list[str]:
    try:
        return world.run(call, fault)
    except Exception as error:
        raise Broken("\n  ".join([f"{type(error).__name__}: {error}", *path])) from error
