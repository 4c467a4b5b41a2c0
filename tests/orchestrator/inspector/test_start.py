"""A run starts its page, and does not depend on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from orchestrator.config import Config
from orchestrator.running import run_scope
from orchestrator.waiting import WorkerFailed


def test_a_page_that_does_not_start_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def late(*_: Any) -> None:
        raise WorkerFailed("start: no answer within 60 s from the inspector")

    ray = MagicMock()
    ray.get_runtime_context().get_node_id.return_value = "ab" * 28
    monkeypatch.setattr(run_scope, "ray", ray)
    monkeypatch.setattr(run_scope, "Inspector", MagicMock())
    monkeypatch.setattr(run_scope, "wait_for", late)
    with run_scope._inspector(Config(), SimpleNamespace(path=tmp_path), None):  # type: ignore[arg-type]
        assert "goes on without its page: start: no answer within 60 s" in caplog.text
    ray.kill.assert_called_once()
