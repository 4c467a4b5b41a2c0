"""What the page says about a run, as plain values. Pure functions of a history and of the newest rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.inspector.codes import CODES
from orchestrator.inspector.history import HEADLINE, History
from orchestrator.inspector.raster import Window
from state.entries import role_of
from state.slots import Slot

Row = Mapping[str, Any]
PRIMARY = ("actor", "critic")
NEWEST_PROBLEMS = 100


def rows(history: History) -> dict[str, Any]:
    """The newest state of every rank and engine, from the journals; shaped as a live run answers."""
    workers = [lane.row() for lane in history.lanes if lane.kind == "rank"]
    engines = [lane.row() for lane in history.lanes if lane.kind == "engine"]
    newest = published(history)
    return {
        "run": history.name,
        "source": "journal",
        "workers": workers,
        "engines": [row | {"behind_by": _behind(row, newest)} for row in engines],
    }


def published(history: History) -> Row | None:
    """The newest publish that was committed."""
    return next((p for p in reversed(history.publishes) if p.get("outcome") == "committed"), None)


def summary(history: History, now: float) -> dict[str, Any]:
    """What the page needs to know before it asks for a window."""
    newest, status = published(history), history.status()
    outcomes = Counter(str(p.get("outcome")) for p in history.publishes)
    view = rows(history)
    return {
        "run": history.name,
        "status": status,
        "incarnation": history.starts[-1].incarnation if history.starts else None,
        "started": history.starts[-1].at if history.starts else None,
        "first": history.first,
        "last": now if status == "running" else history.last,
        "now": now,
        "revision": history.revision,
        "steps": len(history.metrics),
        "present": sorted({CODES[code] for lane in history.lanes for code in lane.present}),
        "ranks": len(view["workers"]),
        "engines": len(view["engines"]),
        "resident": resident(view["workers"], status == "running"),
        "serving": serving(view["engines"], newest),
        "published": None if newest is None else {key: newest.get(key) for key in _PUBLISHED},
        "outcomes": dict(outcomes),
        "saves": sum(role_of(save) == Slot.ACTOR for save in history.saves),
        "problems": {"total": len(history.problems), "newest": history.problems[: -NEWEST_PROBLEMS - 1 : -1]},
        "damaged": history.damaged,
    }


_PUBLISHED = ("at", "publish_id", "slot", "incarnation", "version", "digest", "engines")


def resident(workers: Sequence[Row], running: bool) -> dict[str, Any]:
    """In words, which slot the ranks hold, and whether that is `good`, `busy` or `bad`."""
    if not workers:
        return {"text": "no rank yet", "tone": "busy"}
    poisoned = [str(row["worker"]).split("/", 1)[-1] for row in workers if row["state"] == "poisoned"]
    if poisoned:
        verb = "is" if len(poisoned) == 1 else "are"
        return {"text": f"{_some(poisoned)} {verb} poisoned", "tone": "bad"}
    held = Counter(_holds(row) for row in workers)
    (what, count), *others = held.most_common()
    tone = "good" if all(name in PRIMARY for name in held) else "busy"
    if not others:
        whom = "the rank" if count == 1 else f"all {count} ranks"
        return {"text": f"{what} on {whom}" if running else f"{what} on {whom}, at the end", "tone": tone}
    return {"text": ", ".join(f"{name} on {number}" for name, number in held.most_common()), "tone": tone}


def serving(engines: Sequence[Row], newest: Row | None) -> dict[str, Any]:
    """In words, how many engines serve what was published."""
    if not engines:
        return {"text": "no engine yet", "tone": "busy"}
    current = [row for row in engines if row["state"] == "serving" and _behind(row, newest) == 0]
    others = [str(row["state"]) for row in engines if row not in current]
    states = Counter("behind" if state == "serving" else state for state in others)
    if not current and set(states) == {"dead"} and all(row["reason"] == "shut down" for row in engines):
        return {"text": f"{len(engines)} shut down", "tone": "busy"}
    words = [f"{len(current)} of {len(engines)} serving", *(f"{count} {state}" for state, count in states.items())]
    tone = "good" if len(current) == len(engines) else ("bad" if not current else "busy")
    return {"text": ", ".join(words), "tone": tone}


def metrics(history: History) -> dict[str, Any]:
    """Columns of the headline metrics, at the wall times at which the driver was done with each step.

    A start of the driver between two steps is a row of nulls: no line goes across it.
    """
    done: list[tuple[float, int | None]] = [
        (history.trained[step], step) for step in history.metrics.keys() & history.trained
    ]
    done.sort()
    breaks: list[tuple[float, int | None]] = [(start.at, None) for start in history.starts]
    rows = sorted([*done, *(b for b in breaks if done and done[0][0] < b[0] < done[-1][0])], key=lambda row: row[0])
    columns = {name: [None if step is None else history.metrics[step][name] for _, step in rows] for name in HEADLINE}
    return {"steps": [step for _, step in rows], "times": [at for at, _ in rows], "values": columns}


def marks(history: History, window: Window) -> list[dict[str, Any]]:
    """Publishes in the window: the last committed one of each column, and every one that was not."""
    committed: dict[int, dict[str, Any]] = {}
    failed = []
    for publish in history.publishes:
        if window.start <= publish["at"] <= window.end:
            mark = {key: publish.get(key) for key in _MARK}
            if publish.get("outcome") == "committed":
                committed[int((publish["at"] - window.start) / window.seconds)] = mark
            else:
                failed.append(mark)
    return sorted([*committed.values(), *failed], key=lambda mark: mark["at"])


_MARK = ("at", "publish_id", "outcome", "incarnation", "version", "digest", "engines", "reason")


def chosen(history: History, ranks: str) -> list[int]:
    """Indices of the lanes that `0-63,128` asks for; empty text: all. Engines always. ValueError says what is wrong."""
    wanted: set[int] | None = None
    for part in filter(None, (piece.strip() for piece in ranks.split(","))):
        low, _, high = part.partition("-")
        if not low.strip().isdigit() or (high and not high.strip().isdigit()):
            raise ValueError(f"{part!r} is neither a rank nor a range like 0-63")
        first, last = int(low), int(high or low)
        wanted = (wanted or set()) | {
            lane.rank for lane in history.lanes if lane.rank is not None and first <= lane.rank <= last
        }
    return [
        index
        for index, lane in enumerate(history.lanes)
        if lane.kind == "engine" or wanted is None or lane.rank in wanted
    ]


def _holds(row: Row) -> str:
    return str(row.get("slot") or row["state"])


def _behind(row: Row, newest: Row | None) -> int | None:
    if newest is None or row.get("version") is None or row.get("incarnation") != newest.get("incarnation"):
        return None
    return int(newest["version"]) - int(row["version"])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"
