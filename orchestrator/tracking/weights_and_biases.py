"""Metrics to Weights & Biases: one run there for a run here, however often it is resumed.

Credentials are W&B's own affair: it finds `WANDB_API_KEY` or a login of its own in the driver's environment. Nothing of
the command line, the source or the environment is collected.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from orchestrator.config import Config
from orchestrator.tracking.base import scalars
from state.errors import SlotwiseError

STEP = "rollout"
RUN_ID_FILE = "wandb-run-id.txt"


class NotLoggedIn(SlotwiseError):
    """W&B has no credentials, and must not stop to ask for them."""


class WandbTracker:
    """Logs against the axis `rollout`, so that a run that continues from an earlier step is on the same axis again."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        options = config.tracking.wandb
        if options.mode == "online" and not wandb.login(prompt=False):
            raise NotLoggedIn("no credentials; set WANDB_API_KEY in the driver's environment, or use mode offline")
        settings = wandb.Settings(
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
        )
        self._run = wandb.init(config=config.model_dump(mode="json"), settings=settings)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({STEP: step, **scalars(metrics)})

    def close(self) -> None:
        self._run.finish()


def run_id(run_dir: Path) -> str:
    """The id of the run at W&B; made once, and kept in the run directory."""
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(secrets.token_hex(4) + "\n")
        os.replace(temporary, path)
    return path.read_text().strip()
