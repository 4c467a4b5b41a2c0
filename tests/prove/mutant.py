"""A fault that systems like this one really had, as a patch of ours; the tests that must see it, and its trace.

A patch is by text and must apply exactly once, so that a mutant whose place in the source has moved fails its test
instead of testing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MACHINE, RESIDENCY, STORE = "state/machine.py", "state/residency.py", "state/store.py"
GANG, SHARDS, LIFE = "state/gang.py", "state/shards.py", "state/lifecycle.py"
SCORING, WORKER = "workers/megatron/scoring.py", "workers/megatron/worker.py"
T_MACHINE, T_STORE, T_GANG = "tests/state/test_machine.py", "tests/state/test_store.py", "tests/state/test_gang.py"
T_PUBLISH, T_FLEET = "tests/orchestrator/test_publish.py", "tests/orchestrator/test_fleet.py"
T_ENGINE, T_RESUME = "tests/workers/test_embedded_engine.py", "tests/state/test_resume.py"
T_RANK, T_BEHAVIOUR = "tests/workers/test_rank_slots.py", "tests/workers/test_behaviour_policy.py"
T_CHECKPOINTS, T_PLAN = "tests/state/test_checkpoints.py", "tests/orchestrator/resume/test_slot_plan.py"


@dataclass(frozen=True)
class Patch:
    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Raises LookupError unless the text is there exactly once."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise LookupError(f"{self.file} has {source.count(self.old)} times:\n{self.old}")
        path.write_text(source.replace(self.old, self.new))


@dataclass(frozen=True)
class Trace:
    """What the audit finds in the journals of `scenario` (module and function here) where it runs with the mutant, and
    not where it runs without: a regular expression."""

    scenario: str
    finding: str


@dataclass(frozen=True)
class Mutant:
    """`hazard` in words, `invariant` that it breaks, `killers`: tests of which at least one must fail.

    `trace`: what it leaves in journals, or why no journal can show it.
    """

    hazard: str
    invariant: str
    patches: tuple[Patch, ...]
    killers: tuple[str, ...]
    trace: Trace | str


def mutant(
    hazard: str, invariant: str, *patches: tuple[str, str, str], killers: tuple[str, ...], trace: Trace | str
) -> Mutant:
    return Mutant(hazard, invariant, tuple(Patch(*p) for p in patches), killers, trace)


# Parts of several.
NO_LIVE_CHECK_IN_READY = (
    MACHINE,
    'live = self._must_hold(digest, f"init ended with other bytes than were loaded into {self.primary}")\n',
    "live = None\n",
)
NO_LIVE_CHECK_IN_SNAPSHOT = (
    MACHINE,
    'live = self._must_hold(digest, f"{self.primary} changed outside a step, no snapshot was taken of it")\n',
    "live = None\n",
)
NO_CHECK_OF_MASTERS = (
    MACHINE,
    "if wrong := self._optimizer.master_mismatches():",
    "if wrong := self._optimizer.master_mismatches()[:0]:",
)
NO_QUORUM_CHECK = (
    GANG,
    "    rank = worker.rank\n    if (quorum.run,",
    "    rank = worker.rank\n    if rank >= 0:\n        return None\n    if (quorum.run,",
)
HASHED_WHATEVER_IS_RESIDENT = (
    MACHINE,
    "live = self._store.digest() if self._live.is_resident() else None",
    "live = self._store.digest()",
)
