"""The page of a run from its journals alone: while it runs, and long after. Needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from orchestrator.inspector.access import Access
from orchestrator.inspector.server import Pages, serve
from orchestrator.options.problems import ConfigError, Problem


def view(run_dir: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted. `say` is given the address to open, which holds the token."""
    if not (run_dir / "journal").is_dir():
        raise ConfigError([Problem("RUN_DIR", f"{run_dir} holds no journal/: it is not the directory of a run")])
    asyncio.run(_serve(run_dir, host, port, say))


async def _serve(run_dir: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    access = Access()
    pages = Pages(run_dir, access)
    await pages.fresh()
    try:
        runner, address = await serve(pages, host, port)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError([Problem("--port", f"cannot listen on {host}:{port}: {why}")]) from error
    say(f"{address}/?token={access.token}")
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
