"""Faults on purpose, inside ranks and engines of real runs: an exception or SIGKILL at a boundary that was chosen.

`train.setup_hook` and `rollout.setup_hook` name these functions; what is to fail is in the file that the environment
variable `FAULTS` names, which the test writes before the run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from state.residency import Residency
from workers.weights.process_group import BroadcastGroup

ENVIRONMENT = "FAULTS"
RANK_HOOK = f"{__name__}:into_rank"
ENGINE_HOOK = f"{__name__}:into_engine"
ENGINE_VERBS = ("generate", "pause", "flush", "begin_update", "receive", "prove", "commit", "resume")


@dataclass(frozen=True)
class Fault:
    """`who` fails when it comes to `at` for the `nth` time in its process: right `before`, or right `after`.

    `who`: `actor/1` (of `incarnation`), `engine/0`. `at`: a trigger of the slot machine (of a rank), a verb (of an
    engine), or `bucket` (sent, or received).
    """

    who: str
    at: str
    when: Literal["before", "after"] = "before"
    how: Literal["raise", "kill"] = "raise"
    nth: int = 1
    incarnation: int = 1

    def __str__(self) -> str:
        return f"{self.incarnation}. {self.who} {self.how} {self.when} {self.at} {self.nth}"

    def strike(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # A class of its own: other faults are other failures.
        name = f"{self.at} {self.when}".title().replace(" ", "")
        raise type(name, (RuntimeError,), {})(f"on purpose: {self}")


def write(faults: Sequence[Fault], path: Path) -> None:
    path.write_text(json.dumps([asdict(fault) for fault in faults]))


class Armed:
    """The faults of this process."""

    def __init__(self, who: str, incarnation: int | None = None) -> None:
        faults = [Fault(**one) for one in json.loads(Path(os.environ[ENVIRONMENT]).read_text())]
        self._faults = [f for f in faults if f.who == who and incarnation in (None, f.incarnation)]
        self._seen: Counter[tuple[str, str]] = Counter()

    def reach(self, at: str, when: str) -> None:
        self._seen[at, when] += 1
        for fault in self._faults:
            if (fault.at, fault.when, fault.nth) == (at, when, self._seen[at, when]):
                fault.strike()

    def around(self, at: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def watched(*args: Any, **options: Any) -> Any:
            self.reach(at, "before")
            result = work(*args, **options)
            self.reach(at, "after")
            return result

        return watched


def into_rank(rank: Any) -> None:
    worker = rank._spec.worker
    armed = Armed(f"{worker.role}/{worker.rank}", rank._spec.gang.incarnation)
    fire = Residency.fire

    def watched(residency: Residency, trigger: str, *args: Any, **fields: Any) -> None:
        at = f"{trigger} {residency.state}" if trigger == "done" else trigger
        armed.reach(at, "before")
        fire(residency, trigger, *args, **fields)
        armed.reach(at, "after")

    Residency.fire = watched  # type: ignore[method-assign]
    BroadcastGroup.broadcast = armed.around("bucket", BroadcastGroup.broadcast)  # type: ignore[method-assign]


def into_engine(engine: Any) -> None:
    armed = Armed("/".join(engine.view().engine_id.split("/")[-2:]))
    for verb in ENGINE_VERBS:
        setattr(engine, verb, armed.around(verb, getattr(engine, verb)))
    BroadcastGroup.broadcast = armed.around("bucket", BroadcastGroup.broadcast)  # type: ignore[method-assign]
