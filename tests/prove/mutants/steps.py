# ruff: noqa: E501
"""Training steps (I4, I5, I7), and the policy that the ratio is taken to (I9)."""

from __future__ import annotations

from tests.prove.mutant import (
    MACHINE,
    NO_LIVE_CHECK_IN_SNAPSHOT,
    SCORING,
    STORE,
    T_BEHAVIOUR,
    T_MACHINE,
    WORKER,
    Trace,
    mutant,
)

UNDER = "            scores = self._under(Slot.OLD_ACTOR, version, [samples[i] for i in members[version]], seconds)\n"
NEWEST = """            held = [r.version for r in self._slots.kept if r.slot is Slot.OLD_ACTOR]
            version_of = {version: max(held, default=version)}
            scores = self._under(Slot.OLD_ACTOR, version_of[version], [samples[i] for i in members[version]], seconds)
"""

MUTANTS = (
    mutant(
        "a failed step that has moved the masters passes for none",
        "I5",
        (
            MACHINE,
            "            if not scope.wrote and self._is_still(digest) and",
            "            if self._is_still(digest) or",
        ),
        killers=(f"{T_MACHINE}::test_an_error_after_before_write_is_fatal_whether_bytes_differ_or_not",),
        trace=Trace(
            "scenarios:error_after_a_write", r"actor/0: actor is said to be unchanged by a step in which the optimizer"
        ),
    ),
    mutant(
        "bytes are hashed before the parameters were gathered",
        "I4",
        (
            MACHINE,
            "            self._optimizer.finish_gather()\n            after = self._store.digest()\n",
            "            after = self._store.digest()\n            self._optimizer.finish_gather()\n",
        ),
        killers=(f"{T_MACHINE}::test_commit_waits_for_the_gather_before_it_hashes",),
        trace=Trace(
            "scenarios:a_late_gather", r"actor/1: it attested to actor@1 \(.*\) with live bytes \w+; recorded is \w+"
        ),
    ),
    mutant(
        "the copy of before a step is taken for the trained actor",
        "I4",
        (MACHINE, "        self._store.forget(self._primary)\n        self._live", "        self._live"),
        killers=(f"{T_MACHINE}::test_no_trained_step_is_lost_to_a_borrow",),
        trace=Trace("scenarios:plain", r"actor/0: live bytes were .* actor came back as other bytes"),
    ),
    mutant(
        "bytes that changed in a step in which nobody wrote are committed",
        "I4",
        (MACHINE, "            if not scope.wrote:\n", "            if not scope.wrote and not after:\n"),
        killers=(f"{T_MACHINE}::test_bytes_that_changed_in_a_step_in_which_nobody_wrote_are_not_committed",),
        trace=Trace(
            "scenarios:a_silent_write", r"actor/0: actor changed in rollout 0, in which the optimizer did not write"
        ),
    ),
    mutant(
        "weights that are no numbers are committed, published and saved",
        "I5",
        (
            MACHINE,
            "        if wrong := self._store.not_finite():\n",
            "        if wrong := self._store.not_finite()[:0]:\n",
        ),
        killers=(
            f"{T_MACHINE}::test_a_step_that_leaves_a_value_that_is_not_finite_is_fatal_and_names_rank_and_tensor",
        ),
        trace="digests of values that are not finite are digests like any; a journal holds no values",
    ),
    mutant(
        "a rollout is trained twice",
        "I7",
        (MACHINE, "        if rollout_id + 1 <= before.version:\n", "        if rollout_id + 1 < 0:\n"),
        killers=(f"{T_MACHINE}::test_versions_only_grow",),
        trace=Trace("scenarios:trained_twice", r"actor-0.*version 1 was committed over version 1"),
    ),
    mutant(
        "a copy of the current actor snapshots the slot that was loaded last",
        "I9",
        (MACHINE, '        self._live.must_be_resident(f"snapshot {slot}")\n', ""),
        NO_LIVE_CHECK_IN_SNAPSHOT,
        (
            STORE,
            "        if self._at_home != key or self._pointed is not None:\n",
            "        if self._at_home is None:\n",
        ),
        killers=(f"{T_MACHINE}::test_inside_a_borrow_nothing_happens_to_the_actor",),
        trace=Trace("scenarios:snapshot_inside_a_borrow", r"actor-0.*a snapshot was taken in state resident\.ref"),
    ),
    mutant(
        "the ring gives another version than was asked for",
        "I9",
        (
            MACHINE,
            """        record = self._recorded(key)[0]
        captured = self._ambient.capture()
""",
            """        key = key if key in self._records else max(self._records, key=lambda k: (k.slot == slot, k.version or 0))
        record = self._recorded(key)[0]
        captured = self._ambient.capture()
""",
        ),
        killers=(f"{T_MACHINE}::test_the_ring_holds_the_newest_versions_exactly",),
        trace=Trace("scenarios:late_samples", r"actor/1 took old_actor@3 for the policy that made rollout 3; it was 0"),
    ),
    mutant(
        "old_actor is one version too old where every rollout is published",
        "I9",
        (
            WORKER,
            "        if self._spec.keep_old_actors:\n            self._slots.snapshot(Slot.OLD_ACTOR)\n",
            "",
        ),
        (SCORING, UNDER, NEWEST),
        (
            WORKER,
            "            with self._slots.step(shard.rollout_id) as scope:\n",
            "            if self._spec.keep_old_actors:\n                self._slots.snapshot(Slot.OLD_ACTOR)\n"
            "            with self._slots.step(shard.rollout_id) as scope:\n",
        ),
        killers=(f"{T_BEHAVIOUR}::test_old_actor_is_exactly_what_generated",),
        trace=Trace(
            "scenarios:behaviour_policies", r"actor/0 took old_actor@0 for the policy that made rollout 1; it was 1"
        ),
    ),
    mutant(
        "old_actor is too new in the first step after a push, where pushes come every so often",
        "I9",
        (SCORING, UNDER, NEWEST),
        killers=(f"{T_BEHAVIOUR}::test_old_actor_is_exactly_what_generated",),
        trace=Trace(
            "scenarios:behaviour_policies",
            r"none of actor/0 took old_actor@12 for the policy that made rollout 13, and it was that",
        ),
    ),
)
