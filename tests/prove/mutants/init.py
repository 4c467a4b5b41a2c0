"""Init: which slot is live when it ends, and what the optimizer continues from (I1); what a load is told (I6)."""

from __future__ import annotations

from tests.prove.mutant import (
    LIFE,
    MACHINE,
    NO_CHECK_OF_MASTERS,
    NO_LIVE_CHECK_IN_READY,
    T_MACHINE,
    T_RANK,
    T_RESUME,
    WORKER,
    Trace,
    mutant,
)

NO_MASTERS_IN_JOURNALS = "journals hold no master weights; the first step moves the actor to other weights, as any step"

MUTANTS = (
    mutant(
        "init returns with the reference live under the actor's name",
        "I1",
        (MACHINE, "        if not self._live.is_resident():\n            self._switch(self._primary)\n", ""),
        NO_LIVE_CHECK_IN_READY,
        (LIFE, '("ready", "resident.{primary}", "resident.{primary}")', '("ready", "resident", "resident.{primary}")'),
        NO_CHECK_OF_MASTERS,
        killers=(f"{T_MACHINE}::test_whatever_was_loaded_and_in_which_order_init_ends_with_the_actor_live",),
        trace=Trace("scenarios:plain", r"actor-0.*ready actor from resident\.ref to resident\.actor: it may not"),
    ),
    mutant(
        "init does not look whether the live bytes are those that were loaded",
        "I1",
        NO_LIVE_CHECK_IN_READY,
        killers=(f"{T_MACHINE}::test_ready_sees_bytes_that_are_not_those_loaded",),
        trace=Trace("scenarios:plain", r"actor/1: ready actor, and nobody had hashed it"),
    ),
    mutant(
        "a worker trains and publishes that init has not verified",
        "I1",
        (MACHINE, "        if not self._ready:\n", "        if not self._ready and not self._worker:\n"),
        killers=(f"{T_MACHINE}::test_an_actor_that_ready_did_not_verify_neither_leaves_nor_trains",),
        trace=Trace("scenarios:unverified", r"actor-0.*publish before ready had verified actor"),
    ),
    mutant(
        "the optimizer continues from the reference's masters",
        "I1",
        NO_CHECK_OF_MASTERS,
        killers=(f"{T_MACHINE}::test_ready_sees_masters_of_other_weights",),
        trace=NO_MASTERS_IN_JOURNALS,
    ),
    mutant(
        "the optimizer's masters are taken from every load, and the last one wins",
        "I1",
        (
            WORKER,
            "        if primary:\n            self._optimizer.reload_masters()",
            "        self._optimizer.reload_masters()",
        ),
        killers=(f"{T_RANK}::test_the_masters_are_the_actors_whatever_is_loaded_after_it",),
        trace="init ends with a refusal, for the masters are compared: a poisoned worker, and nothing that went wrong",
    ),
    mutant(
        "what a load needs is written into arguments that everybody shares",
        "I6",
        (
            "state/resume.py",
            "@dataclass(frozen=True, slots=True)\nclass LoadSpec:",
            "@dataclass(slots=True)\nclass LoadSpec:",
        ),
        killers=(f"{T_RESUME}::test_what_a_load_needs_cannot_be_changed",),
        trace="a value that could be changed leaves no trace until somebody changes it",
    ),
    mutant(
        "the configuration can be changed during a run",
        "I6",
        ("state/config.py", "ConfigDict(frozen=True, ", "ConfigDict(frozen=False, "),
        killers=("tests/orchestrator/options/test_load.py::test_no_option_can_be_changed_once_it_is_resolved",),
        trace="a configuration that could be changed leaves no trace until somebody changes it",
    ),
    mutant(
        "the actor's step is applied to the reference",
        "I6",
        (
            "orchestrator/resume/resuming.py",
            'return _slot_load(config, "ref", config.ref.load, config.ref.ckpt_step)',
            'return _slot_load(config, "ref", config.ref.load, config.ref.ckpt_step or config.checkpoint.ckpt_step)',
        ),
        killers=("tests/orchestrator/test_cli.py::test_the_steps_of_actor_and_reference_do_not_mix",),
        trace="journals tell where a slot was loaded from, not where the configuration would have it from",
    ),
)
