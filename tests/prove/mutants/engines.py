# ruff: noqa: E501
"""Engines: which weights they say they serve, and who gets requests (I7, I8)."""

from __future__ import annotations

from tests.prove.mutant import T_ENGINE, T_FLEET, T_PUBLISH, Trace, mutant

CLAIM, FLEET, LIVES = "workers/rollout/claim.py", "orchestrator/fleet.py", "state/engine_life.py"

MUTANTS = (
    mutant(
        "a version is published with the first bucket",
        "I7",
        (
            CLAIM,
            "        self._arrived.add(tensor.name)\n",
            "        self._arrived.add(tensor.name)\n        assert self._updating is not None\n        self._weights = self._updating.weights\n",
        ),
        killers=(f"{T_ENGINE}::test_nothing_is_committed_that_was_not_received_whole_and_proven",),
        trace="an engine's own word is in no journal: the fleet writes down what it proved and committed",
    ),
    mutant(
        "a buffer is filled with the next bucket before everybody has taken this one",
        "I7",
        (
            "workers/weights/ipc.py",
            "            self._wait_for_takers(store, number, len(stream.buckets))\n",
            "            continue\n",
        ),
        killers=("tests/workers/test_slow_engines.py::test_over_shared_memory",),
        trace="the engine proves to hold something else and is torn: an event, and nothing that went wrong",
    ),
    mutant(
        "an engine is committed that proved nothing",
        "I7",
        (
            FLEET,
            "        if unproven := sorted(set(engine_ids) - update.proven):\n",
            "        if unproven := sorted(set(engine_ids) - set(self._roster.updating())):\n",
        ),
        killers=(f"{T_FLEET}::test_nothing_is_committed_that_nobody_proved",),
        trace=Trace(
            "whole_scenarios:every_engine_committed",
            r"run/engine/1 serves 1\.0 of publish-1-1, .* it was found to hold",
        ),
    ),
    mutant(
        "a torn engine is resumed",
        "I8",
        (
            "orchestrator/publish.py",
            "        proven = tuple(engine for engine, verdict in verdicts.items() if verdict.holds)\n",
            "        proven = tuple(verdicts)\n",
        ),
        killers=(f"{T_PUBLISH}::test_an_engine_that_holds_something_else_is_torn_and_the_others_serve",),
        trace="the fleet refuses to commit an engine that did not prove what it holds: the publish is aborted",
    ),
    mutant(
        "a torn engine is resumed, and the fleet looks away",
        "I8",
        (
            "orchestrator/publish.py",
            "        proven = tuple(engine for engine, verdict in verdicts.items() if verdict.holds)\n",
            "        proven = tuple(verdicts)\n",
        ),
        (
            FLEET,
            "        if unproven := sorted(set(engine_ids) - update.proven):\n",
            "        if unproven := sorted(set(engine_ids) - set(self._roster.updating())):\n",
        ),
        killers=(
            f"{T_PUBLISH}::test_an_engine_that_holds_something_else_is_torn_and_the_others_serve",
            f"{T_FLEET}::test_nothing_is_committed_that_nobody_proved",
        ),
        trace=Trace(
            "whole_scenarios:an_engine_that_holds_something_else",
            r"run/engine/1 serves 1\.0 of publish-1-1, .* found to hold",
        ),
    ),
    mutant(
        "an engine serves whatever version it has",
        "I8",
        (LIVES, "is EnginePhase.SERVING and self._status.weights == weights", "is EnginePhase.SERVING"),
        killers=(f"{T_FLEET}::test_requests_go_only_to_an_engine_that_serves_exactly_those_weights",),
        trace="requests are in no journal; an engine refuses those that expect other weights than it has",
    ),
    mutant(
        "a woken engine serves on",
        "I8",
        (
            LIVES,
            '{"trigger": "wake", "source": "asleep", "dest": "stale"}',
            '{"trigger": "wake", "source": "asleep", "dest": "serving"}',
        ),
        killers=("tests/state/test_engine_life.py::test_a_woken_engine_is_stale",),
        trace=Trace(
            "whole_scenarios:an_engine_that_wakes", r"engine-0: wake from asleep to serving: it leads to stale"
        ),
    ),
    mutant(
        "the manifest is computed from what was sent",
        "I7",
        (
            FLEET,
            "                verdicts[engine_id] = ProofVerdict(_differences(proof, manifest))\n",
            "                sent = Manifest(\n"
            "                    manifest.run, manifest.publish_id, manifest.slot, manifest.weights, proof.tensors\n"
            "                )\n"
            "                verdicts[engine_id] = ProofVerdict(_differences(proof, sent))\n",
        ),
        killers=(f"{T_FLEET}::test_an_engine_that_holds_something_else_is_named_with_the_tensor_and_not_committed",),
        trace=Trace(
            "whole_scenarios:an_engine_that_holds_something_else",
            r"run/engine/1 serves 1\.0 of publish-1-1, .* found to hold",
        ),
    ),
)
