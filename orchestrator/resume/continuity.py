"""Is what a resumed gang holds what was saved? Asked once, before the first publish of a process that resumes.

Weights that are loaded from the checkpoint, the actor's and those of slots beside it, have the bytes that were saved,
or the run ends (exit 3). What they and the optimizer compute is compared as well: a jump there is an error where
`checkpoint.resume` is `must`, and a warning that is hard to miss elsewhere. `checkpoint.allow_mismatch` with
`continuity` makes a warning of all of it: whoever changes the weights or the reference on purpose says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import Config
from state import checkpoints
from state.continuity import Probe, breaks
from state.errors import ResumeError
from state.gang import Quorum
from state.resume import LoadSpec, ResumePlan
from state.slots import Slot

logger = logging.getLogger(__name__)


class ContinuityBroken(ResumeError):
    """What was loaded does not compute what it computed when it was saved."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a resumed gang must be found to hold, of `role`.

    `probe` is None where it was lost. `digest` is of its primary's bytes and `kept` by `slot@version` of those of slots
    beside it, as far as they were loaded from there; None and empty where their dtype changed.
    """

    role: str
    directory: Path
    probe: Probe | None
    digest: str | None
    kept: Mapping[str, str]
    with_optimizer: bool
    fatal: bool
    allowed: bool


def expected(config: Config, plan: ResumePlan) -> dict[str, Expected]:
    """By role, from the checkpoints that `plan` continues from; without those of which nothing of ours is resumed."""
    loads = {Slot.ACTOR: (plan.load, plan.load_optimizer)} if plan.source == "native" else {}
    if plan.critic is not None and not plan.critic.fresh_head:
        loads[Slot.CRITIC] = (plan.critic.load, plan.critic.load_optimizer)
    found = {role: _expected(config, role, load, with_optimizer) for role, (load, with_optimizer) in loads.items()}
    return {str(role): one for role, one in found.items() if one is not None}


def _expected(config: Config, role: Slot, load: LoadSpec, with_optimizer: bool) -> Expected | None:
    if load.path is None or load.iteration is None:
        return None
    directory = checkpoints.iteration_dir(load.path, load.iteration)
    if not (directory / checkpoints.MARKER).exists():
        return None
    stored, marker, checkpoint = (
        checkpoints.read_probe(directory),
        checkpoints.read_marker(directory),
        config.checkpoint,
    )
    same_dtype = marker.dtype == config.model.dtype
    slots = (marker.slots or []) if same_dtype and with_optimizer else []
    allowed = "continuity" in checkpoint.allow_mismatch
    return Expected(
        role,
        directory,
        stored,
        marker.digest if same_dtype else None,
        {f"{one.slot}@{one.version}": one.digest for one in slots},
        with_optimizer,
        fatal=checkpoint.resume == "must" and not allowed,
        allowed=allowed,
    )


def confirm(expected: Expected, held: Quorum, take: Callable[[], Probe]) -> tuple[str, ...]:
    """Compare with what the gang swears to, and with the probe that `take` computes now.

    Returns what jumped, having warned of it; raises `ContinuityBroken` where that ends the run.
    """
    weights = list(_other_bytes(expected, held))
    found = [*weights, *_jumps(expected, take)]
    if not found:
        return ()
    words = (
        f"what was loaded from {expected.directory} is not what was saved there:\n"
        + "\n".join(f"  - {one}" for one in found)
        + "\nEither something else was loaded (name the right one with checkpoint.ckpt_step), or the model, its "
        "reference or the code was changed on purpose: then accept it with checkpoint.allow_mismatch [continuity]"
    )
    if expected.fatal or (weights and not expected.allowed):
        raise ContinuityBroken(words)
    logger.warning("WARNING: THE RUN DOES NOT CONTINUE WHERE IT STOPPED: %s", words)
    return tuple(found)


def _other_bytes(expected: Expected, held: Quorum) -> Iterator[str]:
    """Slots whose bytes are not those that were loaded from the checkpoint."""
    if expected.digest is not None and expected.digest != held.digest:
        yield f"the {expected.role}'s digest is {held.digest}, saved was {expected.digest}"
    for one in held.kept:
        name = f"{one.slot}@{one.version}"
        saved = expected.kept.get(name)
        if saved is not None and saved != one.digest:
            yield f"the digest of {name} is {one.digest}, saved was {saved}: its bytes are not those of the checkpoint"


def _jumps(expected: Expected, take: Callable[[], Probe]) -> Iterator[str]:
    if expected.probe is None:
        yield f"{checkpoints.PROBE} is missing, so that reference and optimizer cannot be compared with what they were"
    else:
        yield from breaks(expected.probe, take(), with_optimizer=expected.with_optimizer, role=expected.role)
