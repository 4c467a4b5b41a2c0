"""What is live on one worker: the one place where that changes, and the one place where a change is refused.

`fire` is a transition: the table says whether the trigger may happen, a new immutable view replaces the old one, and
the journal has a line of it. Work happens *between* two triggers, never in a callback: the first says what is about to
happen to the live bytes, the second that it did. The lock goes around triggers only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from transitions import MachineError

from state import lifecycle
from state.errors import InvariantViolation
from state.gang import GangId
from state.journal import Journal
from state.slots import Slot, SlotRecord, SlotView, WorkerId


class SlotViolation(InvariantViolation):
    """Something was asked of the slots that may not happen in their present state; nothing was done."""


@dataclass(frozen=True, slots=True)
class Poison:
    """What was going on when the live bytes stopped being trustworthy, and why."""

    origin: str
    reason: str


class Residency:
    """The state, view and poison of one worker whose primary slot is `primary`."""

    def __init__(self, worker: WorkerId, gang: GangId, journal: Journal, primary: Slot) -> None:
        self.worker, self.gang, self.primary = worker, gang, primary
        self.lock = threading.RLock()
        self.poison: Poison | None = None
        self._journal = journal
        self._lent = False
        self._life = lifecycle.Lifecycle(primary)
        self._view = SlotView(worker, gang.world_size, gang.incarnation, self.state, 0, "created", time.time())

    @property
    def state(self) -> str:
        return self._life.state

    @property
    def view(self) -> SlotView:
        """Never waits, whatever the worker is doing."""
        return self._view

    @property
    def lent(self) -> bool:
        return self._lent

    def is_resident(self) -> bool:
        """Whether the primary is what the live model computes with, and nothing is going on."""
        return self.state == lifecycle.resident(self.primary)

    def fire(self, trigger: str, slot: Slot, record: SlotRecord | None = None, **fields: Any) -> None:
        """One transition, about `slot`; `record` is what then is known of the live bytes."""
        with self.lock:
            before = self.state
            if self._lent and trigger not in lifecycle.WHILE_LENT:
                self.refuse(f"{trigger} {slot} inside a borrow")
            try:
                self._life.move(trigger, slot)
            except MachineError as error:
                self.refuse(f"{trigger} {slot} in state {before}: it may not happen there", cause=error)
            detail = str(fields.pop("detail", ""))
            self._view = SlotView(
                self.worker,
                self.gang.world_size,
                self.gang.incarnation,
                self.state,
                self._view.transition + 1,
                trigger,
                time.time(),
                slot if lifecycle.holds(self.state, slot) else None,
                record if lifecycle.holds_as_recorded(self.state, slot) else None,
                detail,
            )
            about = {"slot": slot} | ({"version": record.version, "digest": record.digest} if record else {})
            self.note(
                "transition",
                transition=self._view.transition,
                trigger=trigger,
                before=before,
                after=self.state,
                **(about | fields),
                **({"detail": detail} if detail else {}),
            )

    @contextmanager
    def moving(self, trigger: str, slot: Slot, **fields: Any) -> Iterator[None]:
        """Bytes move inside: enter by `trigger`; the body ends by firing its success, or the worker is poisoned."""
        self.fire(trigger, slot, **fields)
        try:
            yield
        except BaseException as error:
            self.fail(reason(error))
            raise

    @contextmanager
    def lending(self) -> Iterator[None]:
        """A borrow is open inside."""
        outer, self._lent = self._lent, True
        try:
            yield
        finally:
            self._lent = outer

    def fail(self, why: str, **evidence: str) -> None:
        """The live bytes are not to be trusted any more. `evidence` goes into the journal."""
        if self.state != "poisoned":
            self.poison = Poison(self.state, why)
            self.fire("fail", self.primary, None, detail=f"while {self.state}: {why}", **evidence)

    def refuse(
        self, what: str, kind: type[InvariantViolation] = SlotViolation, cause: Exception | None = None
    ) -> NoReturn:
        """Journal a refusal and raise. Nothing was done."""
        self.note("refusal", state=self.state, lent=self._lent, what=what)
        poisoned = f" ({self.poison.reason})" if self.poison else ""
        raise kind(f"{self.worker} refuses to {what}{poisoned}") from cause

    def must_be(self, state: str, what: str) -> None:
        if self.state != state:
            self.refuse(f"{what} in state {self.state}: it needs {state}")

    def must_be_resident(self, what: str) -> None:
        self.must_be(lifecycle.resident(self.primary), what)

    def note(self, kind: str, **fields: Any) -> None:
        """A line in the journal, with whose it is."""
        self._journal.append(
            kind,
            run=self.worker.run,
            role=self.worker.role,
            rank=self.worker.rank,
            world_size=self.gang.world_size,
            incarnation=self.gang.incarnation,
            **fields,
        )


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
