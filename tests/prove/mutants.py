# ruff: noqa: E501
"""The faults that systems like this one really had, each as a patch of ours, and the tests that must see it.

A patch is by text and must apply exactly once, so that a mutant whose place in the source has moved fails its test
instead of testing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MACHINE, RESIDENCY, STORE = "state/machine.py", "state/residency.py", "state/store.py"
GANG, SHARDS, LIFE = "state/gang.py", "state/shards.py", "state/lifecycle.py"
T_MACHINE, T_STORE, T_GANG = "tests/state/test_machine.py", "tests/state/test_store.py", "tests/state/test_gang.py"
T_PUBLISH, T_FLEET = "tests/orchestrator/test_publish.py", "tests/orchestrator/test_fleet.py"
T_ENGINE, T_RESUME = "tests/workers/test_embedded_engine.py", "tests/state/test_resume.py"


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
class Mutant:
    """`hazard` in words, `invariant` that it breaks, `killers`: tests of which at least one must fail."""

    hazard: str
    invariant: str
    patches: tuple[Patch, ...]
    killers: tuple[str, ...]


def mutant(
    hazard: str,
    invariant: str,
    *patches: tuple[str, str, str],
    killers: tuple[str, ...],
) -> Mutant:
    return Mutant(hazard, invariant, tuple(Patch(*p) for p in patches), killers)


NO_LIVE_CHECK_IN_READY = (
    MACHINE,
    'live = self._must_hold(digest, f"init ended with other bytes than were loaded into {self.primary}")\n',
    "live = None\n",
)
NO_QUORUM_CHECK = (
    GANG,
    """    rank = worker.rank
    if (quorum.run,""",
    """    rank = worker.rank
    if rank >= 0:
        return None
    if (quorum.run,""",
)
NO_LIVE_CHECK_IN_SNAPSHOT = (
    MACHINE,
    'live = self._must_hold(digest, f"{self.primary} changed outside a step, no snapshot was taken of it")\n',
    "live = None\n",
)

MUTANTS = (
    mutant(
        "init returns with the reference live under the actor's name",
        "I1",
        (
            MACHINE,
            "        if not self._live.is_resident():\n            self._switch(self._primary)\n",
            "",
        ),
        NO_LIVE_CHECK_IN_READY,
        (LIFE, '("ready", "resident.{primary}", "resident.{primary}")', '("ready", "resident", "resident.{primary}")'),
        (
            MACHINE,
            "if wrong := self._optimizer.master_mismatches():",
            "if wrong := self._optimizer.master_mismatches()[:0]:",
        ),
        killers=(f"{T_MACHINE}::test_whatever_was_loaded_and_in_which_order_init_ends_with_the_actor_live",),
    ),
    mutant(
        "init does not look whether the live bytes are those that were loaded",
        "I1",
        NO_LIVE_CHECK_IN_READY,
        killers=(f"{T_MACHINE}::test_ready_sees_bytes_that_are_not_those_loaded",),
    ),
    mutant(
        "a worker trains and publishes that init has not verified",
        "I1",
        (MACHINE, "        if not self._ready:\n", "        if not self._ready and not self._worker:\n"),
        killers=(f"{T_MACHINE}::test_an_actor_that_ready_did_not_verify_neither_leaves_nor_trains",),
    ),
    mutant(
        "nobody checks that the bytes to be published are those of the record",
        "I2",
        (GANG, "        elif a.live is None or a.live.summary != a.recorded:", "        elif a.live is None:"),
        killers=(f"{T_MACHINE}::test_bytes_that_changed_without_a_step_do_not_leave",),
    ),
    mutant(
        "publish and save do not check the quorum on the rank",
        "I2",
        NO_QUORUM_CHECK,
        killers=(f"{T_MACHINE}::test_a_rank_that_moved_since_it_attested_voids_the_quorum",),
    ),
    mutant(
        "a backup is taken of whatever is live",
        "I2",
        NO_LIVE_CHECK_IN_SNAPSHOT,
        killers=(f"{T_MACHINE}::test_only_what_is_recorded_is_snapshotted",),
    ),
    mutant(
        "ranks that differ agree by majority: the first one speaks for all",
        "I2",
        (GANG, "    if len(ranks_by_answer) == 1:\n", "    if ranks_by_answer:\n"),
        killers=(f"{T_GANG}::test_every_kind_of_disagreement_names_the_rank",),
    ),
    mutant(
        "replicas that drifted apart are not compared",
        "I2",
        (SHARDS, "        if len(held) > 1:\n", "        if len(held) > len(regions) + 1:\n"),
        killers=(f"{T_GANG}::test_every_kind_of_disagreement_names_the_rank",),
    ),
    mutant(
        "a quorum is used twice",
        "I2",
        (MACHINE, "            self._spent.add(quorum.publish_id)\n", ""),
        killers=(f"{T_MACHINE}::test_a_quorum_is_used_once",),
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
        (
            MACHINE,
            "live = self._store.digest() if self._live.is_resident() else None",
            "live = self._store.digest()",
        ),
        NO_QUORUM_CHECK,
        killers=(f"{T_MACHINE}::test_a_quorum_of_before_does_not_let_the_reference_out",),
    ),
    mutant(
        "the label says actor while the bytes have been discarded",
        "I3",
        (MACHINE, '        self._live.fire("sleep", self.primary, record)\n        try:\n', "        try:\n"),
        killers=(f"{T_MACHINE}::test_a_woken_worker_is_who_it_was",),
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
        (
            MACHINE,
            '        self._live.fire("switched", key.slot, record, live=live)\n',
            "",
        ),
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
    ),
    mutant(
        "the home keeps its name while it is overwritten",
        "I5",
        (STORE, "        self._at_home = None\n        for block, held in zip", "        for block, held in zip"),
        killers=(f"{T_STORE}::test_a_copy_that_breaks_off_leaves_nobody_at_home_and_the_actor_restorable",),
    ),
    mutant(
        "the optimizer continues from the reference's masters",
        "I1",
        (
            MACHINE,
            "if wrong := self._optimizer.master_mismatches():",
            "if wrong := self._optimizer.master_mismatches()[:0]:",
        ),
        killers=(f"{T_MACHINE}::test_ready_sees_masters_of_other_weights",),
    ),
    mutant(
        "a failed step that has moved the masters passes for none",
        "I5",
        (
            MACHINE,
            "            if not scope.wrote and self._is_still(digest) and",
            "            if self._is_still(digest) or",
        ),
        killers=(f"{T_MACHINE}::test_an_error_after_before_write_is_fatal_whether_bytes_differ_or_not",),
    ),
    mutant(
        "a worker whose optimizer had written is healed from a copy of before",
        "I5",
        (LIFE, 'RESTORABLE = ("loading", "switching")', 'RESTORABLE = ("loading", "switching", "stepping")'),
        killers=(f"{T_MACHINE}::test_an_error_after_before_write_is_fatal_whether_bytes_differ_or_not",),
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
    ),
    mutant(
        "the copy of before a step is taken for the trained actor",
        "I4",
        (MACHINE, "        self._store.forget(self._primary)\n        self._live", "        self._live"),
        killers=(f"{T_MACHINE}::test_no_trained_step_is_lost_to_a_borrow",),
    ),
    mutant(
        "a rollout is trained twice",
        "I7",
        (MACHINE, "        if rollout_id + 1 <= before.version:\n", "        if rollout_id + 1 < 0:\n"),
        killers=(f"{T_MACHINE}::test_versions_only_grow",),
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
    ),
    mutant(
        "live tensors are read while asleep",
        "I3",
        (
            MACHINE,
            "live = self._store.digest() if self._live.is_resident() else None",
            "live = self._store.digest()",
        ),
        killers=(f"{T_MACHINE}::test_a_woken_worker_is_who_it_was",),
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
    ),
    mutant(
        "a sleeper saves and publishes",
        "I2",
        (LIFE, '("publish", "resident.actor", "publishing")', '("publish", "asleep", "publishing")'),
        (LIFE, '("save", "resident.{primary}", "saving")', '("save", "asleep", "saving")'),
        killers=("tests/state/test_lifecycle.py",),
    ),
    mutant(
        "memory is released whose copy differs",
        "I3",
        (STORE, "            if not _equal(block.home, held):", "            if block is None:"),
        killers=(f"{T_STORE}::test_nothing_is_released_whose_copy_differs",),
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
    ),
    mutant(
        "the actor's step is applied to the reference",
        "I6",
        (
            "orchestrator/resuming.py",
            'return _slot_load(config, "ref", config.ref.load, config.ref.ckpt_step)',
            'return _slot_load(config, "ref", config.ref.load, config.ref.ckpt_step or config.checkpoint.ckpt_step)',
        ),
        killers=("tests/orchestrator/test_cli.py::test_the_steps_of_actor_and_reference_do_not_mix",),
    ),
    mutant(
        "a typo makes an empty slot",
        "I3",
        (STORE, "        if slot not in self._tiers:\n", "        if slot not in self._tiers and not self._live:\n"),
        (STORE, "        return self._tiers[slot]\n", "        return self._tiers.setdefault(slot, Tier.COPY)\n"),
        killers=(f"{T_MACHINE}::test_a_slot_that_this_worker_does_not_have_is_refused",),
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
    ),
    mutant(
        "bytes that changed in a step in which nobody wrote are committed",
        "I4",
        (
            MACHINE,
            "            if not scope.wrote:\n",
            "            if not scope.wrote and not after:\n",
        ),
        killers=(f"{T_MACHINE}::test_bytes_that_changed_in_a_step_in_which_nobody_wrote_are_not_committed",),
    ),
    mutant(
        "`release` resumes at step 1",
        "I10",
        (
            "state/resume.py",
            'return _weights_alone("release", spec, f"the tracker in {request.load} says `release`: weights alone")',
            'return replace(_weights_alone("release", spec, "weights alone"), start_rollout_id=1)',
        ),
        killers=(f"{T_RESUME}::test_release_is_weights_alone_from_step_zero",),
    ),
    mutant(
        "a version is published with the first bucket",
        "I7",
        (
            "workers/rollout/claim.py",
            "        self._arrived.add(tensor.name)\n",
            "        self._arrived.add(tensor.name)\n        assert self._updating is not None\n        self._weights = self._updating.weights\n",
        ),
        killers=(f"{T_ENGINE}::test_nothing_is_committed_that_was_not_received_whole_and_proven",),
    ),
    mutant(
        "an engine is committed that proved nothing",
        "I7",
        (
            "orchestrator/fleet.py",
            "        if unproven := sorted(set(engine_ids) - update.proven):\n",
            "        if unproven := sorted(set(engine_ids) - set(self._engines)):\n",
        ),
        killers=(f"{T_FLEET}::test_nothing_is_committed_that_nobody_proved",),
    ),
    mutant(
        "a torn engine is resumed",
        "I8",
        (
            "orchestrator/publish.py",
            "        proven = tuple(engine for engine, differences in verdict.items() if not differences)\n",
            "        proven = tuple(verdict)\n",
        ),
        killers=(f"{T_PUBLISH}::test_an_engine_that_holds_something_else_is_torn_and_the_others_serve",),
    ),
    mutant(
        "an engine serves whatever version it has",
        "I8",
        (
            "state/engine_life.py",
            "is EnginePhase.SERVING and self._status.weights == weights",
            "is EnginePhase.SERVING",
        ),
        killers=(f"{T_FLEET}::test_requests_go_only_to_an_engine_that_serves_exactly_those_weights",),
    ),
    mutant(
        "a woken engine serves on",
        "I8",
        (
            "state/engine_life.py",
            '{"trigger": "wake", "source": "asleep", "dest": "stale"}',
            '{"trigger": "wake", "source": "asleep", "dest": "serving"}',
        ),
        killers=("tests/state/test_engine_life.py",),
    ),
    mutant(
        "the manifest is computed from what was sent",
        "I7",
        (
            "orchestrator/fleet.py",
            "                verdict[engine_id] = _differences(proof, manifest)\n",
            "                sent = Manifest(\n"
            "                    manifest.run, manifest.publish_id, manifest.slot, manifest.weights, proof.tensors\n"
            "                )\n"
            "                verdict[engine_id] = _differences(proof, sent)\n",
        ),
        killers=(f"{T_FLEET}::test_an_engine_that_holds_something_else_is_named_with_the_tensor_and_not_committed",),
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
    ),
    mutant(
        "a transition is not journaled",
        "I12",
        (
            RESIDENCY,
            '            self.note(\n                "transition",',
            '            dict(\n                kind="transition",',
        ),
        killers=(f"{T_MACHINE}::test_every_transition_and_refusal_is_journaled_in_order",),
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
    ),
    mutant(
        "retention deletes what the tracker names",
        "I11",
        ("state/checkpoints.py", "if n != named and n not in protect", "if n not in protect"),
        ("state/checkpoints.py", "[n for n in inventory.ours if n <= named]", "[*inventory.ours]"),
        killers=("tests/state/test_checkpoints.py",),
    ),
    mutant(
        "the tracker moves before the marker is there",
        "I11",
        (
            "state/checkpoints.py",
            "    _commit(iteration_dir(root, iteration), marker)\n",
            '    _write_atomically(Path(root) / TRACKER, f"{iteration}\\n".encode())\n'
            "    _commit(iteration_dir(root, iteration), marker)\n",
        ),
        killers=("tests/state/test_checkpoints.py", "tests/state/test_checkpoints_killed.py"),
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
    ),
)
