"""Options about slots and checkpoints. A leaf: imports pydantic alone, so that wrong options are refused fast."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class RefConfig(Frozen):
    """The reference policy of the KL term. It is held as a slot of its own as soon as a KL term is on."""

    load: str | None = None
    """Checkpoint or Hugging Face directory of the reference. Unset: the weights a fresh actor would start from."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Iteration of `ref.load`; never applies to any other slot. Unset: what its tracker names."""
    tier: Literal["copy", "device"] = "copy"
    """Where its bytes rest: `copy` in host memory, `device` beside the actor (a borrow is a pointer swap)."""
    update_interval: int | None = Field(default=None, ge=1)
    """Replace the reference by the actor after every so many rollouts; a resumed run goes on with the replaced one.
    Unset: the reference never changes."""


class TeacherConfig(Frozen):
    """The teacher of on-policy distillation: another set of weights for the same architecture, held as a slot."""

    load: str | None = None
    """Checkpoint or Hugging Face directory of the teacher."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Iteration of `teacher.load`; never applies to any other slot. Unset: what its tracker names."""
    tier: Literal["copy", "device"] = "copy"
    """Where its bytes rest, as `ref.tier`."""


class OldActorConfig(Frozen):
    """Copies of the actor as it was published, for `algorithm.old_logprobs` `old_actor`."""

    keep: int = Field(default=2, ge=2)
    """Published versions to keep: the newest, and the one before it, of which samples may still wait. A `fully_async`
    loop needs `loop.max_staleness` + 1."""


class CheckpointConfig(Frozen):
    """Where runs are saved and what they continue from."""

    save: str | None = None
    """Directory for checkpoints. Unset: `checkpoints/` in the run directory once `save_interval` is set."""
    save_interval: int | None = Field(default=None, ge=1)
    """Save after every so many rollouts, and after the last. Unset: never."""
    async_save: bool = False
    """Save in the background: ranks copy what they agreed on to host memory and go on training while the copy is
    written. The checkpoint counts once every rank has written its part; one is under way at a time, and the last one is
    waited for."""
    keep: int | None = Field(default=None, ge=1)
    """Newest checkpoints to keep. Unset: all."""
    save_hf_interval: int | None = Field(default=None, ge=1)
    """Export the actor as a Hugging Face directory after every so many rollouts, and after the last. Unset: never."""
    save_hf: str | None = None
    """Directory of an export; `{rollout_id}` in it is the rollout it was made after. Unset: `huggingface/{rollout_id}`
    in the run directory."""
    load: str | None = None
    """Directory to continue from. Unset: `save`, so that the same command continues a run."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Iteration of the actor to load. Unset: what the tracker names."""
    resume: Literal["auto", "must"] = "auto"
    """`auto`: a missing checkpoint is a warning and a fresh start. `must`: an error."""
    allow_mismatch: tuple[Literal["model", "tokenizer", "data", "continuity"], ...] = ()
    """What may be another one than the checkpoint was saved with, or not be said there; then a warning, otherwise an
    error. `continuity`: what the gang computes on a fixed batch, and the bytes of slots that were saved beside the
    actor."""
    stop_deadline_s: float = Field(default=120.0, ge=0)
    """Asked to end by SIGTERM, a run that saves ends its step and saves, for at most so long; a second SIGTERM ends it
    at once. 0: the first one does."""
    weights_only: bool = False
    """Load weights without optimizer, random state and data cursor; start at rollout 0."""
