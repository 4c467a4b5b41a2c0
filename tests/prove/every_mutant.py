"""All mutants, by what they break."""

from __future__ import annotations

from tests.prove.mutant import Mutant
from tests.prove.mutants import agreement, engines, init, journaling, residency, resuming, steps

MUTANTS: tuple[Mutant, ...] = (
    *init.MUTANTS,
    *agreement.MUTANTS,
    *residency.MUTANTS,
    *steps.MUTANTS,
    *engines.MUTANTS,
    *resuming.MUTANTS,
    *journaling.MUTANTS,
)
