# ruff: noqa: E501
"""Permits, quorums and replicas: what may leave a worker (I2)."""

from __future__ import annotations

from tests.prove.mutant import (
    GANG,
    HASHED_WHATEVER_IS_RESIDENT,
    LIFE,
    MACHINE,
    NO_LIVE_CHECK_IN_SNAPSHOT,
    NO_QUORUM_CHECK,
    SHARDS,
    T_GANG,
    T_MACHINE,
    T_PUBLISH,
    Trace,
    mutant,
)

MUTANTS = (
    mutant(
        "nobody checks that the bytes to be published are those of the record",
        "I2",
        (GANG, "        elif a.live is None or a.live.summary != a.recorded:", "        elif a.live is None:"),
        killers=(f"{T_MACHINE}::test_bytes_that_changed_without_a_step_do_not_leave",),
        trace=Trace(
            "scenarios:a_stray_write", r"publish-1-2 was agreed on version 0 with digest \w+ of actor/0, which at"
        ),
    ),
    mutant(
        "publish and save do not check the quorum on the rank",
        "I2",
        NO_QUORUM_CHECK,
        killers=(f"{T_MACHINE}::test_a_rank_that_moved_since_it_attested_voids_the_quorum",),
        trace=Trace(
            "scenarios:moved_since", r"publish-1-2: actor/0 attested at transition \d+ and let bytes out at \d+"
        ),
    ),
    mutant(
        "a backup is taken of whatever is live",
        "I2",
        NO_LIVE_CHECK_IN_SNAPSHOT,
        killers=(f"{T_MACHINE}::test_only_what_is_recorded_is_snapshotted",),
        trace=Trace(
            "scenarios:a_backup_of_strays", r"actor/0: a snapshot of actor was taken, and nobody had hashed it"
        ),
    ),
    mutant(
        "ranks that differ agree by majority: the first one speaks for all",
        "I2",
        (GANG, "    if len(ranks_by_answer) == 1:\n", "    if ranks_by_answer:\n"),
        killers=(f"{T_GANG}::test_every_kind_of_disagreement_names_the_rank",),
        trace=Trace(
            "scenarios:another_version", r"publish-1-1 was agreed on version 0 .* of actor/1, .* with version 1"
        ),
    ),
    mutant(
        "replicas that drifted apart are not compared",
        "I2",
        (SHARDS, "        if len(held) > 1:\n", "        if len(held) > len(regions) + 1:\n"),
        killers=(f"{T_GANG}::test_every_kind_of_disagreement_names_the_rank",),
        trace=Trace("scenarios:a_drifting_replica", r"although actor/1 held \w+, its replica actor/0"),
    ),
    mutant(
        "a quorum is used twice",
        "I2",
        (MACHINE, "            self._spent.add(quorum.publish_id)\n", ""),
        killers=(f"{T_MACHINE}::test_a_quorum_is_used_once",),
        trace="its use is a transition, so that the second is refused all the same: the rank has moved since it attested",
    ),
    mutant(
        "a permit goes on working after its scope",
        "I2",
        (
            GANG,
            "    def revoke(self) -> None:\n        self._valid = False",
            "    def revoke(self) -> None:\n        return",
        ),
        killers=(f"{T_MACHINE}::test_a_permit_is_good_inside_its_scope_only",),
        trace="whoever reads memory with an old permit writes no entry",
    ),
    mutant(
        "whichever slot is resident is published",
        "I2",
        (LIFE, '("publish", "resident.actor", "publishing")', '("publish", "resident", "publishing")'),
        (
            GANG,
            '        if a.slot not in PRIMARY_SLOTS or a.state != f"resident.{a.slot}":',
            "        if a.slot is None:",
        ),
        HASHED_WHATEVER_IS_RESIDENT,
        NO_QUORUM_CHECK,
        killers=(f"{T_MACHINE}::test_a_quorum_of_before_does_not_let_the_reference_out",),
        trace=Trace("scenarios:reference_loaded_again", r"publish-1-2 published ref"),
    ),
    mutant(
        "a sleeper saves and publishes",
        "I2",
        (LIFE, '("publish", "resident.actor", "publishing")', '("publish", "asleep", "publishing")'),
        (LIFE, '("save", "resident.{primary}", "saving")', '("save", "asleep", "saving")'),
        killers=("tests/state/test_lifecycle.py::test_what_each_state_leaves_by",),
        trace="no quorum is good for a sleeper: none is found while it sleeps, and one of before is void",
    ),
    mutant(
        "engines are connected after the gang has agreed and entered",
        "I2",
        (
            "orchestrator/publish.py",
            "        engines = self.engines.reconcile()\n        alive = time.perf_counter()\n        quorum = self._enter(publish_id)\n",
            "        quorum = self._enter(publish_id)\n        engines = self.engines.reconcile()\n        alive = time.perf_counter()\n",
        ),
        killers=(f"{T_PUBLISH}::test_everything_in_its_order",),
        trace="the journals of driver and ranks are ordered by transitions and publishes; connecting is neither",
    ),
    mutant(
        "a digest that a permutation does not change",
        "I2",
        (
            "state/mixing.py",
            "    return z.bitwise_xor_(_shift_right(z, 31)).bitwise_or_(1)\n",
            "    return torch.ones_like(z)\n",
        ),
        killers=("tests/state/test_digest.py::test_a_permutation_and_a_transposition_are_seen",),
        trace="every digest in every journal is computed the same way",
    ),
)
