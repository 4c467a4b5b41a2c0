"""What travels with a publish: which weights these are, and the digest of every tensor."""

from __future__ import annotations

from dataclasses import dataclass

from state.digest_records import TensorDigest
from state.slots import Slot, WeightId


@dataclass(frozen=True, slots=True)
class Manifest:
    """Taken from the gang's attested records, never computed from what is sent.

    `tensors` are sorted by their Hugging Face name and are exactly what an engine must hold afterwards.
    """

    run: str
    publish_id: str
    slot: Slot
    weights: WeightId
    tensors: tuple[TensorDigest, ...]
