"""Which weights are live on every rank and engine: asked of a running run over HTTP, else read from its journals.
(Of a run in another machine's cluster: `remote_slots.py`.)

The run writes `inspector.json` with `url` and `token`; a GET of the URL with the token as bearer answers

    {"run": NAME, "source": "live",
     "workers": [{"worker", "rank", "role", "slot", "state", "version", "incarnation", "digest", "tier", "since",
                  "last_transition"}],
     "engines": [{"engine", "state", "version", "behind_by"}]}

Only the standard library is used for asking, so that an answer does not wait for Ray to load.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.options import ConfigError, Problem

ASK_TIMEOUT_S = 1.5
View = Mapping[str, Any]

_WORKER_COLUMNS = (
    "worker",
    "role",
    "rank",
    "slot",
    "state",
    "version",
    "incarnation",
    "digest",
    "tier",
    "since",
    "last_transition",
)
_ENGINE_COLUMNS = ("engine", "state", "version", "behind_by")


def find_run(named: str | None) -> Path:
    """The directory of a run: a path, a name under `runs/`, or the newest there. `ConfigError` with what there is."""
    runs = Path("runs")
    there = sorted((p for p in runs.iterdir() if p.is_dir()), key=_last_used) if runs.is_dir() else []
    if named is None:
        if there:
            return there[-1]
        raise ConfigError([Problem("--run", f"there are no runs in {runs.absolute()}; name a run directory")])
    for candidate in (Path(named), runs / named):
        if candidate.is_dir():
            return candidate
    names = f"; runs there: {', '.join(p.name for p in there)}" if there else ""
    raise ConfigError([Problem("--run", f"{named} is neither a directory nor a run in {runs.absolute()}{names}")])


def read(run_dir: Path) -> View:
    """The view of a run: live where the run answers, else from its journals."""
    live = _ask(run_dir / "inspector.json")
    if live is not None:
        return live
    # Here, because it needs torch's neighbours and a live run does not.
    from state.audit import latest_views

    return latest_views(run_dir)


def render(view: View, now: float) -> RenderableType:
    """Tables of workers and engines; `now` is a wall time in seconds, against which `since` is shown."""
    head = f"{view['run']} ({'live' if view['source'] == 'live' else 'from the journals: the run does not answer'})"
    workers = Table(title="training workers", title_justify="left")
    for column in _WORKER_COLUMNS:
        workers.add_column(column, no_wrap=column in ("worker", "slot", "state"))
    for row in sorted(view["workers"], key=lambda row: (row["role"], row["rank"])):
        workers.add_row(*(_cell(column, row.get(column), now) for column in _WORKER_COLUMNS))
    engines = Table(title="rollout engines", title_justify="left")
    for column in _ENGINE_COLUMNS:
        engines.add_column(column)
    for row in sorted(view["engines"], key=lambda row: str(row["engine"])):
        engines.add_row(*(_cell(column, row.get(column), now) for column in _ENGINE_COLUMNS))
    return Group(Text(head), workers, engines)


def watch(read_view: Callable[[], View], interval_s: float) -> Iterator[View]:
    """Views, one every `interval_s` seconds, for as long as they are taken."""
    while True:
        yield read_view()
        time.sleep(interval_s)


def _last_used(run_dir: Path) -> float:
    return max([run_dir.stat().st_mtime, *(p.stat().st_mtime for p in run_dir.glob("journal/*.jsonl"))])


def _ask(inspector: Path) -> View | None:
    """None when the run does not answer: it has ended, was killed, or its address file is torn."""
    try:
        address = json.loads(inspector.read_bytes())
        request = urllib.request.Request(address["url"], headers={"Authorization": f"Bearer {address['token']}"})
        # No proxy: the address is one of this machine or of the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
            view = json.load(answer)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return view if isinstance(view, dict) else None


def _cell(column: str, value: Any, now: float) -> Text:
    if value is None:
        return Text("-", style="dim")
    match column:
        case "since":
            return Text(_ago(now - float(value)))
        case "digest":
            return Text(str(value)[:12])
        case "state":
            return Text(str(value), style=_style(str(value)))
        case "behind_by" if value:
            return Text(str(value), style="yellow")
        case _:
            return Text(str(value))


def _style(state: str) -> str:
    if state.lower() in ("poisoned", "dead"):
        return "bold red"
    if state in ("resident.actor", "resident.critic") or state.lower() == "serving":
        return "green"
    return "yellow"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 3600 else f"{seconds / 3600:.1f} h ago"
