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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.options.problems import ConfigError, Problem
from state.slots import SHORT_DIGEST
from state.stored import parse_object

ASK_TIMEOUT_S = 1.5
View = Mapping[str, Any]

_ENDS = {"done": "the run is done", "failed": "the run ended early"}
_SILENT = "the run does not answer"
_WORKER_COLUMNS = ("rank", "slot", "state", "version", "digest", "tier", "since", "last")
_ENGINE_COLUMNS = ("engine", "state", "version", "behind by", "reason")


def find_run(named: str | None) -> Path:
    """The directory of a run: a path, a name under `runs/`, or the newest there. `ConfigError` with what there is."""
    runs = Path("runs")
    there = sorted(filter(_is_run, runs.iterdir()), key=_last_used) if runs.is_dir() else []
    if named is None:
        if there:
            return there[-1]
        raise ConfigError([Problem("--run", f"there are no runs in {runs.absolute()}; name a run directory")])
    for candidate in (Path(named), runs / named):
        if _is_run(candidate):
            return candidate
    if Path(named).is_dir():
        what = "holds no config.yaml and no journal/: it is not the directory of a run"
        raise ConfigError([Problem("--run", f"{named} {what}")])
    names = f"; runs there: {', '.join(p.name for p in there)}" if there else ""
    raise ConfigError([Problem("--run", f"{named} is neither a directory nor a run in {runs.absolute()}{names}")])


def _is_run(directory: Path) -> bool:
    return (directory / "config.yaml").is_file() or (directory / "journal").is_dir()


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
    how = "live" if view["source"] == "live" else f"from the journals: {_ENDS.get(str(view.get('ended')), _SILENT)}"
    rows = sorted(view["workers"], key=lambda row: (row["role"], row["rank"]))
    workers = _table(_WORKER_COLUMNS, (_worker(row, now) for row in rows))
    troubles = [Text(f"{_rank(row)}: {row['detail']}", style="red") for row in rows if row.get("detail")]
    engines = sorted(view["engines"], key=lambda row: str(row["engine"]))
    return Group(
        Text.assemble((str(view["run"]), "bold"), f"  {how}\n"),
        workers,
        *troubles,
        Text(),
        _table(_ENGINE_COLUMNS, map(_engine, engines)),
    )


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != "reason")
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _worker(row: View, now: float) -> Mapping[str, Text]:
    since = row.get("since")
    return {
        "rank": Text(_rank(row)),
        "slot": _text(row.get("slot")),
        "state": Text(str(row["state"]).split(".")[0], style=_style(str(row["state"]))),
        "version": _weights(row),
        "digest": _text(row.get("digest"), most=SHORT_DIGEST),
        "tier": _text(row.get("tier")),
        "since": _text(None if since is None else _ago(now - float(since))),
        "last": _text(row.get("last_transition")),
    }


def _engine(row: View) -> Mapping[str, Text]:
    behind_by = row.get("behind_by")
    return {
        "engine": Text("/".join(str(row["engine"]).split("/")[-2:])),
        "state": Text(str(row["state"]), style=_style(str(row["state"]))),
        "version": _weights(row),
        "behind by": Text(str(behind_by), style="yellow") if behind_by else _text(behind_by),
        "reason": _text(row.get("reason")),
    }


def _rank(row: View) -> str:
    return f"{row['role']}/{row['rank']}"


def _weights(row: View) -> Text:
    """`INCARNATION.VERSION`."""
    if row.get("version") is None or row.get("incarnation") is None:
        return _text(row.get("version"))
    return Text(f"{row['incarnation']}.{row['version']}")


def _text(value: Any, most: int | None = None) -> Text:
    return Text("-", style="dim") if value is None else Text(str(value)[:most])


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
        address = parse_object(inspector.read_bytes())
        request = urllib.request.Request(address["url"], headers={"Authorization": f"Bearer {address['token']}"})
        # No proxy: the address is one of this machine or of the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
            view = json.load(answer)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return view if isinstance(view, dict) else None


def _style(state: str) -> str:
    if state.lower() in ("poisoned", "dead"):
        return "bold red"
    if state in ("resident.actor", "resident.critic") or state.lower() == "serving":
        return "green"
    return "yellow"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
