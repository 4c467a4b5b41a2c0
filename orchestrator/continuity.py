"""Is what a resumed gang holds what was saved? Asked once, before the first publish of a process that resumes.

A jump is an error where `checkpoint.resume` is `must` (exit 3), and a warning that is hard to miss elsewhere, or where
`checkpoint.allow_mismatch` names `continuity`: whoever changes the reference on purpose says so. A slot that is loaded
from beside the actor in the checkpoint has the bytes that were saved, or it is an error under `auto` too.
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
from state.resume import ResumePlan

logger = logging.getLogger(__name__)


class ContinuityBroken(ResumeError):
    """What was loaded does not compute what it computed when it was saved."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a resumed gang must be found to hold.

    `digest` is of the actor's bytes and `kept` by `slot@version` of those of slots beside it, as far as they were
    loaded from there; None and empty where their dtype changed.
    """

    directory: Path
    probe: Probe
    digest: str | None
    kept: Mapping[str, str]
    with_optimizer: bool
    fatal: bool
    allowed: bool


def expected(config: Config, plan: ResumePlan) -> Expected | None:
    """From the checkpoint that `plan` continues from; None where it does not say, or where nothing is resumed."""
    if plan.source != "native" or plan.path is None or plan.iteration is None:
        return None
    directory = checkpoints.iteration_dir(plan.path, plan.iteration)
    stored = checkpoints.read_probe(directory)
    if stored is None:
        return None
    probe, marker = Probe.from_json(stored), checkpoints.read_marker(directory)
    same_dtype, checkpoint = probe.dtype == config.model.dtype, config.checkpoint
    slots = marker.get("slots", []) if same_dtype and plan.load_optimizer else []
    allowed = "continuity" in checkpoint.allow_mismatch
    return Expected(
        directory,
        probe,
        marker.get("digest") if same_dtype else None,
        {f"{one['slot']}@{one['version']}": one["digest"] for one in slots},
        plan.load_optimizer,
        fatal=checkpoint.resume == "must" and not allowed,
        allowed=allowed,
    )


def confirm(expected: Expected, held: Quorum, take: Callable[[], Probe]) -> tuple[str, ...]:
    """Compare with what the gang swears to, and with the probe that `take` computes now.

    Returns what jumped, having warned of it; raises `ContinuityBroken` where that ends the run.
    """
    kept = list(_kept(expected, held))
    found = [*kept, *breaks(expected.probe, take(), with_optimizer=expected.with_optimizer)]
    if expected.digest is not None and expected.digest != held.digest:
        found.insert(0, f"the actor's digest is {held.digest}, saved was {expected.digest}")
    if not found:
        return ()
    words = (
        f"what was loaded from {expected.directory} is not what was saved there:\n"
        + "\n".join(f"  - {one}" for one in found)
        + "\nEither something else was loaded (name the right one with checkpoint.ckpt_step), or the model, its "
        "reference or the code was changed on purpose: then accept it with checkpoint.allow_mismatch [continuity]"
    )
    if expected.fatal or (kept and not expected.allowed):
        raise ContinuityBroken(words)
    logger.warning("WARNING: THE RUN DOES NOT CONTINUE WHERE IT STOPPED: %s", words)
    return tuple(found)


def _kept(expected: Expected, held: Quorum) -> Iterator[str]:
    """Slots beside the actor whose bytes are not those that were loaded from the checkpoint."""
    for one in held.kept:
        name = f"{one.slot}@{one.version}"
        saved = expected.kept.get(name)
        if saved is not None and saved != one.digest:
            yield f"the digest of {name} is {one.digest}, saved was {saved}: its bytes are not those of the checkpoint"
