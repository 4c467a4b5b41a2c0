"""What goes wrong in a worker's constructor is raised by the first thing that it is asked, as what it is."""

from __future__ import annotations

from typing import Any

import pytest

from state.errors import InvariantViolation
from state.gang import GangId
from state.slots import Slot, WorkerId
from workers.megatron import actor


class Spec:
    worker = WorkerId("run", Slot.ACTOR, 1)
    gang = GangId(2, 1, "hash")


@pytest.mark.parametrize("error", [InvariantViolation("other bytes"), RuntimeError("no such file")])
def test_a_constructors_error_keeps_its_class(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def make(spec: Any) -> Any:
        raise error

    monkeypatch.setattr(actor, "_make", make)
    plain: Any = actor.MegatronWorker
    worker = plain.__ray_metadata__.modified_class(Spec())
    assert repr(worker) == "MegatronWorker(run/actor/1)"
    for verb in (lambda: worker.init(None), worker.open_meeting, worker.view):
        with pytest.raises(type(error), match=str(error)):
            verb()
