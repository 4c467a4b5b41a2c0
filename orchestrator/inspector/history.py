"""A run as its journals tell it so far: lanes, publishes, what went wrong, and the headline metrics."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from orchestrator.inspector.lanes import SHUT_DOWN, Lane
from orchestrator.inspector.tail import Line, Tail
from state.entries import fault

HEADLINE = ("reward/mean", "train/kl_loss", "train/grad_norm", "perf/step_s")


@dataclass(slots=True)
class Start:
    """One start of the run's driver. `end` is when it said that it ended, None while it has not."""

    incarnation: int
    at: float
    pid: int
    end: float | None = None
    outcome: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class History:
    """Grows with each `refresh`. `revision` counts the entries read, so that equal revisions show the same."""

    run_dir: Path
    lanes: list[Lane] = field(default_factory=list)
    publishes: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    trained: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float | None]] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None
    revision: int = 0
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _by_name: dict[str, Lane] = field(default_factory=dict)
    _metrics_restarts: int = 0

    def refresh(self) -> bool:
        """Read what was written since; whether there was anything."""
        before = self.revision
        for path in sorted(self.run_dir.glob("journal/*.jsonl")):
            tail = self._tails.setdefault(path, Tail(path, fault))
            for line in tail.read():
                self._take(line, tail)
        self._read_metrics()
        return self.revision != before

    @property
    def name(self) -> str:
        """The run's, as its ranks call it."""
        ranks = (str(lane.row()["worker"]) for lane in self.lanes if lane.kind == "rank")
        return next(ranks, self.run_dir.name).split("/")[0]

    @property
    def damaged(self) -> dict[str, int]:
        """Lines that could not be read, by file."""
        return {path.name: tail.damaged for path, tail in self._tails.items() if tail.damaged}

    def status(self) -> str:
        """`running`, `done`, `failed`, or `silent`: it has not ended, and its driver is not on this machine."""
        if not self.starts:
            return "silent"
        newest = self.starts[-1]
        if newest.end is not None:
            return newest.outcome or "failed"
        return "running" if psutil.pid_exists(newest.pid) else "silent"

    def ends(self) -> tuple[array[float], array[float]]:
        """For each start of the driver: when it began, and when everything that it had started was over.

        A start that was killed said nothing: it was over when the next one began at the latest.
        """
        began = array("d", (start.at for start in self.starts))
        after = [*began[1:], float("inf")]
        ends = [after[i] if start.end is None else start.end for i, start in enumerate(self.starts)]
        return began, array("d", ends)

    def _take(self, line: Line, tail: Tail) -> None:
        entry = line.entry
        if not isinstance(entry.get("at"), int | float):
            return
        at = float(entry["at"])
        self.revision += 1
        self.first = at if self.first is None else min(self.first, at)
        self.last = at if self.last is None else max(self.last, at)
        match entry.get("kind"):
            case "created":
                self._lane(f"{entry.get('role')}/{entry.get('rank')}", "rank", tail).created(line)
            case "transition":
                lane = self._lane(f"{entry.get('role')}/{entry.get('rank')}", "rank", tail)
                lane.moved(line)
                if entry.get("trigger") == "fail":
                    self._problem(at, lane.name, "poisoned", entry.get("detail", ""))
            case "snapshot":
                self._lane(f"{entry.get('role')}/{entry.get('rank')}", "rank", tail).snapshot(line)
            case "refusal":
                self._problem(at, f"{entry.get('role')}/{entry.get('rank')}", "refused", entry.get("what", ""))
            case "engine":
                lane = self._lane(str(entry.get("engine")), "engine", tail)
                lane.engine(line)
                if entry.get("trigger") in ("abort", "withdraw", "die") and entry.get("reason") != SHUT_DOWN:
                    self._problem(at, lane.name, str(entry.get("state")), entry.get("reason"))
            case "driver_started":
                self.starts.append(Start(int(entry.get("incarnation", 0)), at, int(entry.get("pid", 0))))
            case "run_ended" if self.starts:
                newest = self.starts[-1]
                newest.end, newest.outcome, newest.reason = at, entry.get("outcome"), entry.get("reason")
                if entry.get("outcome") != "done":
                    self._problem(at, "driver", "run failed", entry.get("reason"))
            case "gang_failed":
                self._problem(at, "driver", "gang failed", f"{entry.get('why')}: {entry.get('reason')}")
            case "gang_rebuild" if self.starts:
                self.starts[-1].incarnation = int(entry.get("incarnation", 0))
            case "trained":
                self.trained[int(entry.get("rollout_id", -1))] = at
            case "publish":
                self.publishes.append({key: value for key, value in entry.items() if key not in _LEFT_OUT})
                if entry.get("outcome") != "committed":
                    self._problem(at, "driver", f"publish {entry.get('outcome')}", entry.get("reason"))
            case "save":
                self.saves.append({key: value for key, value in entry.items() if key not in _LEFT_OUT})

    def _lane(self, name: str, kind: Any, tail: Tail) -> Lane:
        lane = self._by_name.get(name)
        if lane is None:
            lane = self._by_name[name] = Lane(name, kind, tail)
            place = bisect_left([_order(other) for other in self.lanes], _order(lane))
            self.lanes.insert(place, lane)
        return lane

    def _problem(self, at: float, lane: str, what: str, reason: Any) -> None:
        problem = {"at": at, "lane": lane, "what": what, "reason": plain_text(str(reason or ""))}
        insort(self.problems, problem, key=lambda known: float(known["at"]))

    def _read_metrics(self) -> None:
        path = self.run_dir / "metrics.jsonl"
        tail = self._tails.setdefault(path, Tail(path))
        lines = tail.read()
        if tail.restarts != self._metrics_restarts:
            self._metrics_restarts = tail.restarts
            self.metrics.clear()
        for line in lines:
            step = line.entry.get("step")
            if isinstance(step, int):
                self.revision += 1
                self.metrics[step] = {name: _number(line.entry.get(name)) for name in HEADLINE}


_LEFT_OUT = ("tensors", "transitions", "summaries", "replicas")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def plain_text(text: str) -> str:
    """Without the terminal colours that Ray puts into its errors."""
    return _ESCAPES.sub("", text)


def _order(lane: Lane) -> tuple[bool, list[int | str]]:
    """Ranks before engines, numbers by value."""
    parts: list[int | str] = [f"{int(part):09d}" if part.isdigit() else part for part in lane.name.split("/")]
    return lane.kind == "engine", parts
