"""What an engine was found to hold after a transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """On one engine, in words: `differences`, tensors that are not the manifest's; `failed`, why it could not be looked
    at. With neither it holds exactly the manifest."""

    differences: tuple[str, ...] = ()
    failed: str | None = None

    @property
    def holds(self) -> bool:
        return not self.differences and self.failed is None

    def __str__(self) -> str:
        if self.failed is not None:
            return self.failed
        return self.differences[0] if self.differences else "holds what was published"
