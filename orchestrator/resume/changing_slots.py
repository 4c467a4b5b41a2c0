"""Slots beside the actor that change during a run, and what becomes of one that a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config import Config
from state.checkpoints import Marker
from state.slots import Slot


def changing(config: Config) -> frozenset[Slot]:
    """Slots beside the actor that change during a run, so that its checkpoints hold them."""
    refreshed = config.algorithm.needs_ref and config.ref.update_interval is not None
    return frozenset(
        ([Slot.REF] if refreshed else []) + ([Slot.OLD_ACTOR] if config.algorithm.old_logprobs == "old_actor" else [])
    )


def warnings(config: Config, directory: Path, marker: Marker) -> tuple[str, ...]:
    """What is worth saying of the reference, where a run goes on from `directory` and was or will be refreshing it."""
    held = next((one.version for one in marker.slots or () if one.slot is Slot.REF), None)
    if Slot.REF not in changing(config):
        if not held:  # none, or one that was never refreshed
            return ()
        said = f"{directory} holds the reference as it was refreshed during the run, ref@{held}"
        if not config.algorithm.needs_ref:
            return (f"{said}; no KL term is on any more, so it is left behind and checkpoints from here on lack it",)
        return (
            f"{said}; ref.update_interval is not set any more, so the reference is again what the configuration says, "
            "and the KL to it jumps. Set ref.update_interval to go on with the refreshed one",
        )
    if held is not None:
        return ()
    return (
        f"ref.update_interval is set, and {directory} was saved by a run that did not refresh its reference: it begins "
        f"as the configuration says, and is replaced by the actor after every {config.ref.update_interval} rollouts",
    )
