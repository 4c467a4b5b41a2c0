# ruff: noqa: E501
"""That everything is written down, and that looking waits for nobody (I12)."""

from __future__ import annotations

from tests.prove.mutant import MACHINE, RESIDENCY, T_MACHINE, Trace, mutant

MUTANTS = (
    mutant(
        "a transition is not journaled",
        "I12",
        (
            RESIDENCY,
            '            self.note(\n                "transition",',
            '            dict(\n                kind="transition",',
        ),
        killers=(f"{T_MACHINE}::test_every_transition_and_refusal_is_journaled_in_order",),
        trace=Trace("scenarios:plain", r"actor/1 has no publish publish-1-1"),
    ),
    mutant(
        "reading the state waits for the work",
        "I12",
        (
            MACHINE,
            '        """What is live right now. Never blocks, whatever the worker is doing."""\n        return self._live.view\n',
            '        """What is live right now. Never blocks, whatever the worker is doing."""\n'
            "        with self._live.lock:\n            return self._live.view\n",
        ),
        killers=(f"{T_MACHINE}::test_reading_the_state_waits_for_nothing",),
        trace="who waited for how long is in no journal",
    ),
)
