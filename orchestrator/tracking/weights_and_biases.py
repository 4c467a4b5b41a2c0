"""Metrics to Weights & Biases: one run there for a run here, however often it is resumed.

Credentials are W&B's own affair: it finds `WANDB_API_KEY` or a login of its own in the driver's environment. Nothing of
the command line, the source or the environment is collected.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import wandb

from orchestrator.config import Config
from orchestrator.tracking.base import scalars
from state.errors import SlotwiseError

STEP = "rollout"
FLUSH_S = 1.0
"""How long W&B's process keeps what it was told before it writes it."""
KEPT = 64
"""Steps that can be told again; far more than a process of W&B that has ended goes unnoticed for."""
RUN_ID_FILE = "wandb-run-id.txt"


class NotLoggedIn(SlotwiseError):
    """W&B has no credentials, and must not stop to ask for them."""


class WandbTracker:
    """Logs against the axis `rollout`, so that a run that continues from an earlier step is on the same axis again.

    W&B writes in a process of its own, which `ray job stop` and Ctrl-C end before the run has ended. Then another one
    is started, and told again what the first may not have written. (So a step may be there twice, with one value.)
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        options = config.tracking.wandb
        if options.mode == "online" and not wandb.login(prompt=False):
            raise NotLoggedIn("no credentials; set WANDB_API_KEY in the driver's environment, or use mode offline")
        self._config = config.model_dump(mode="json")
        self._settings = wandb.Settings(
            mode="online" if options.mode == "online" else "offline",
            run_id=run_id(run_dir),
            resume="allow",
            root_dir=str(run_dir),
            project=options.project,
            entity=options.entity,
            run_name=config.run.name,
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            init_timeout=60,
            x_disable_meta=True,
            x_disable_stats=True,
            x_transaction_log_flush_interval=FLUSH_S,
        )
        self._recent: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._run = self._open()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {STEP: step, **scalars(metrics)}
        self._recent.append(row)
        try:
            self._run.log(row)
        except ConnectionError:
            self._open_again()

    def close(self) -> None:
        try:
            self._run.finish()
        except ConnectionError:
            self._open_again()
            self._run.finish()

    def _open(self) -> Any:
        run = wandb.init(config=self._config, settings=self._settings)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _open_again(self) -> None:
        with suppress(ConnectionError):
            wandb.teardown()
        self._run = self._open()
        for row in self._recent:
            self._run.log(row)


def run_id(run_dir: Path) -> str:
    """The id of the run at W&B; made once, and kept in the run directory."""
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(secrets.token_hex(4) + "\n")
        os.replace(temporary, path)
    return path.read_text().strip()
