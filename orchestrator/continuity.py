"""Is what a resumed gang holds what was saved? Asked once, after the first publish of a process that resumes.

A jump is an error where `checkpoint.resume` is `must` (exit 3), and a warning that is hard to miss elsewhere, or where
`checkpoint.allow_mismatch` names `continuity`: whoever changes the reference on purpose says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import Config
from state import checkpoints
from state.continuity import Probe, breaks
from state.errors import ResumeError
from state.resume import ResumePlan

logger = logging.getLogger(__name__)


class ContinuityBroken(ResumeError):
    """What was loaded does not compute what it computed when it was saved."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a resumed gang must be found to hold. `digest` is of the actor's bytes, None where their dtype changed."""

    directory: Path
    probe: Probe
    digest: str | None
    with_optimizer: bool
    fatal: bool


def expected(config: Config, plan: ResumePlan) -> Expected | None:
    """From the checkpoint that `plan` continues from; None where it does not say, or where nothing is resumed."""
    if plan.source != "native" or plan.path is None or plan.iteration is None:
        return None
    directory = checkpoints.iteration_dir(plan.path, plan.iteration)
    stored = checkpoints.read_probe(directory)
    if stored is None:
        return None
    probe = Probe.from_json(stored)
    digest = checkpoints.read_marker(directory).get("digest") if probe.dtype == config.model.dtype else None
    checkpoint = config.checkpoint
    fatal = checkpoint.resume == "must" and "continuity" not in checkpoint.allow_mismatch
    return Expected(directory, probe, digest, plan.load_optimizer, fatal)


def confirm(expected: Expected, digest: str, take: Callable[[], Probe]) -> tuple[str, ...]:
    """Compare with the actor's `digest` as published, and with the probe that `take` computes now.

    Returns what jumped, having warned of it; raises `ContinuityBroken` where that ends the run.
    """
    found = list(breaks(expected.probe, take(), with_optimizer=expected.with_optimizer))
    if expected.digest is not None and expected.digest != digest:
        found.insert(0, f"the actor's digest is {digest}, saved was {expected.digest}")
    if not found:
        return ()
    words = (
        f"what was loaded from {expected.directory} is not what was saved there:\n"
        + "\n".join(f"  - {one}" for one in found)
        + "\nEither something else was loaded (name the right one with checkpoint.ckpt_step), or the model, its "
        "reference or the code was changed on purpose: then accept it with checkpoint.allow_mismatch [continuity]"
    )
    if expected.fatal:
        raise ContinuityBroken(words)
    logger.warning("WARNING: THE RUN DOES NOT CONTINUE WHERE IT STOPPED: %s", words)
    return tuple(found)
