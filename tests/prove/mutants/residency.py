"""What is live, while slots are lent, copied, released and restored (I3, I5)."""

from __future__ import annotations

from tests.prove.mutant import (
    HASHED_WHATEVER_IS_RESIDENT,
    LIFE,
    MACHINE,
    RESIDENCY,
    SCORING,
    STORE,
    T_MACHINE,
    T_RANK,
    T_STORE,
    Trace,
    mutant,
)

MUTANTS = (
    mutant(
        "the label says actor while the bytes have been discarded",
        "I3",
        (MACHINE, '        self._live.fire("sleep", self.primary, record)\n        try:\n', "        try:\n"),
        killers=(f"{T_MACHINE}::test_a_woken_worker_is_who_it_was",),
        trace="the sleep is what its label hides: the next to hash reads memory that is gone, and the process ends",
    ),
    mutant(
        "an exception inside a borrow leaves the reference live",
        "I3",
        (
            MACHINE,
            """            try:
                yield record
            finally:
                self._switch(self._primary)
                self._ambient.restore(captured)
""",
            """            yield record
            self._switch(self._primary)
            self._ambient.restore(captured)
""",
        ),
        killers=(f"{T_MACHINE}::test_training_after_scoring_the_reference_trains_the_actor",),
        trace=Trace(
            "scenarios:error_in_a_borrow",
            r"actor/0: it is asked to step actor .* and ref is live although nobody",
        ),
    ),
    mutant(
        "the mode and random state of a borrow stay",
        "I3",
        (
            MACHINE,
            "                self._switch(self._primary)\n                self._ambient.restore(captured)\n",
            "                self._switch(self._primary)\n",
        ),
        killers=(f"{T_MACHINE}::test_a_borrow_is_a_bit_exact_no_op",),
        trace="journals hold weights, neither modes nor random states",
    ),
    mutant(
        "the pass of the reference runs through the actor",
        "I3",
        (
            SCORING,
            "        with self._slots.borrow(slot, version):\n",
            "        with self._slots.borrow(Slot.ACTOR):\n",
        ),
        killers=(f"{T_RANK}::test_log_probs_of_a_slot_depend_on_that_slot_and_on_no_other",),
        trace="the journal says truly that the actor was live; who was to be scored is the algorithm's to know",
    ),
    mutant(
        "a copy fails half way and the label stays",
        "I5",
        (
            MACHINE,
            "        moved = self._store.bring(key, self._primary)\n",
            """        self._live.fire("switched", key.slot, record, live=None)
        moved = self._store.bring(key, self._primary)
""",
        ),
        (MACHINE, '        self._live.fire("switched", key.slot, record, live=live)\n', ""),
        (
            RESIDENCY,
            """        try:
            yield
        except BaseException as error:
            self.fail(reason(error))
            raise
""",
            """        yield
""",
        ),
        killers=(f"{T_MACHINE}::test_a_copy_that_breaks_off_on_the_way_in_poisons_and_heals",),
        trace=Trace("scenarios:broken_copy", r"actor/0: ref@0 came in, and nobody had hashed it"),
    ),
    mutant(
        "what came in is not looked at",
        "I3",
        (
            MACHINE,
            'live = None if is_proven else self._must_hold(digest, f"{key} came back as other bytes")\n',
            "live = None if is_proven else self._store.digest().summary\n",
        ),
        killers=(f"{T_MACHINE}::test_a_backing_copy_that_changed_is_seen_and_never_trusted",),
        trace=Trace("scenarios:damaged_copy", r"actor/0: ref@0 came in with live bytes \w+; recorded is \w+"),
    ),
    mutant(
        "the home keeps its name while it is overwritten",
        "I5",
        (STORE, "        self._at_home = None\n        for block, held in zip", "        for block, held in zip"),
        killers=(f"{T_STORE}::test_a_copy_that_breaks_off_leaves_nobody_at_home_and_the_actor_restorable",),
        trace=Trace("scenarios:broken_copy", r"actor/0: live bytes were .* actor came back as other bytes"),
    ),
    mutant(
        "live tensors are read while asleep",
        "I3",
        HASHED_WHATEVER_IS_RESIDENT,
        killers=(f"{T_MACHINE}::test_a_woken_worker_is_who_it_was",),
        trace="memory that was released has no bytes to find: to hash it ends the process",
    ),
    mutant(
        "waking restores nothing",
        "I3",
        (
            MACHINE,
            """        with self._live.moving("wake", self.primary):
            self._store.reclaim()
            self._bring(self._primary, verify=True)
""",
            """        with self._live.moving("wake", self.primary):
            self._store.reclaim()
            self._live.fire("switched", self.primary, self._recorded(self._primary)[0], live=None)
""",
        ),
        killers=(f"{T_MACHINE}::test_a_woken_worker_is_who_it_was",),
        trace=Trace("scenarios:sleep_and_wake", r"actor/1: actor@1 came in, and nobody had hashed it"),
    ),
    mutant(
        "memory is released whose copy differs",
        "I3",
        (STORE, "            if not _equal(block.home, held):", "            if block is None:"),
        killers=(f"{T_STORE}::test_nothing_is_released_whose_copy_differs",),
        trace=Trace(
            "scenarios:sleep_beside_a_damaged_copy", r"actor/0: live bytes were .* actor came back as other bytes"
        ),
    ),
    mutant(
        "a typo makes an empty slot",
        "I3",
        (STORE, "        if slot not in self._tiers:\n", "        if slot not in self._tiers and not self._live:\n"),
        (STORE, "        return self._tiers[slot]\n", "        return self._tiers.setdefault(slot, Tier.COPY)\n"),
        killers=(f"{T_MACHINE}::test_a_slot_that_this_worker_does_not_have_is_refused",),
        trace=Trace("scenarios:a_slot_that_is_none", r"actor/0: this worker has no slot critic; it has actor"),
    ),
    mutant(
        "a copy from a slot that is not held does nothing",
        "I3",
        (
            STORE,
            "        self._must_hold(key)\n        if self.tier(key.slot) is Tier.DEVICE",
            "        if not self.holds(key):\n            return False\n        if self.tier(key.slot) is Tier.DEVICE",
        ),
        killers=(f"{T_STORE}::test_what_is_not_at_home_is_not_copied_from_there",),
        trace=Trace("scenarios:a_copy_that_is_gone", r"actor/0: live bytes were .* ref came back as other bytes"),
    ),
    mutant(
        "a slot that rests on the device is not looked at when it comes in",
        "I3",
        (
            MACHINE,
            "        is_proven = not moved and not verify and key == self._primary\n",
            "        is_proven = not moved and not verify\n",
        ),
        killers=(f"{T_MACHINE}::test_what_a_borrow_leaves_in_a_slot_on_the_device_is_seen_by_the_next",),
        trace=Trace("scenarios:on_the_device", r"actor/1: ref@0 came in, and nobody had hashed it"),
    ),
    mutant(
        "something begins inside a borrow",
        "I3",
        (
            RESIDENCY,
            "            if self._lent and trigger not in lifecycle.WHILE_LENT:\n",
            "            if self._lent and not trigger:\n",
        ),
        killers=(f"{T_MACHINE}::test_inside_a_borrow_also_of_the_actor_nothing_else_begins",),
        trace=Trace("scenarios:load_inside_a_borrow", r"actor/0: load teacher began while ref was lent"),
    ),
    mutant(
        "a worker whose optimizer had written is healed from a copy of before",
        "I5",
        (LIFE, 'RESTORABLE = ("loading", "switching")', 'RESTORABLE = ("loading", "switching", "stepping")'),
        killers=(f"{T_MACHINE}::test_an_error_after_before_write_is_fatal_whether_bytes_differ_or_not",),
        trace=Trace("scenarios:heal_after_a_step", r"actor/0: it was restored after an error while stepping"),
    ),
)
