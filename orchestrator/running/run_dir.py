"""The directory of a run: what it was asked, how it started, what happened."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config import Config
from orchestrator.options.problems import ConfigError, Problem
from orchestrator.resume import resuming
from orchestrator.running.rebuilding import Verdict
from state.entries import fault
from state.gang import GangId
from state.journal import Journal, JournalDamaged, read_journal, require_whole
from state.resume import ResumePlan
from state.slots import Slot

DRIVER_JOURNAL = "driver.jsonl"
_BEGIN = ("driver_started", "gang_rebuild")
"""Kinds of entries that begin an incarnation."""
_FILES = ("config.yaml", "resume.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl")
_KEPT = 4000
"""Characters of an error, with the traceback of the rank, that are kept in the journal."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """An open run directory. `incarnation` counts the starts of the gang in it, this one included."""

    path: Path
    incarnation: int
    journal: Journal

    @staticmethod
    def open(config: Config, plan: ResumePlan) -> RunDir:
        """Create it, or continue in it; writes `config.yaml` and `resume.json`."""
        path = resuming.run_dir(config)
        try:
            (path / "journal").mkdir(parents=True, exist_ok=True)
            for other in sorted((path / "journal").glob("*.jsonl")):
                require_whole(other)  # those of ranks and engines are written on too, where nobody sees this soon
            for name in _FILES:
                if (path / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path / name))
            journal_path = path / "journal" / DRIVER_JOURNAL
            known = _incarnations(journal_path)
            journal = Journal(journal_path, "driver")
            opened = RunDir(path, max(known, default=0) + 1, journal)
            _write(path / "config.yaml", config_text(config))
            opened._write_plan(plan)
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
            raise ConfigError(
                [Problem("run.dir", f"{path} cannot be used ({what}); mend it, or use another")]
            ) from error
        asked = config.loop.start_rollout_id
        journal.append("driver_started", incarnation=opened.incarnation, pid=os.getpid(), start_rollout_id=asked)
        return opened

    def next(self, plan: ResumePlan) -> RunDir:
        """The same directory, for the gang that replaces the one that failed."""
        following = replace(self, incarnation=self.incarnation + 1)
        following._write_plan(plan)
        self.journal.append("gang_rebuild", incarnation=following.incarnation)
        return following

    def gang_failed(self, ranks: Mapping[str, str], error: str, verdict: Verdict) -> None:
        """`ranks`: by name, those that were found dead or poisoned."""
        self.journal.append(
            "gang_failed",
            incarnation=self.incarnation,
            ranks=dict(ranks),
            reason=error[:_KEPT],
            rebuild=verdict.rebuild,
            why=verdict.why,
        )

    def gang_started(self, gang: GangId, plan: ResumePlan) -> None:
        """Every rank has filled its slots and verified its primary."""
        self._gang_started(Slot.ACTOR, gang, plan.to_json())
        if plan.critic is not None:
            beginning = {"source": plan.source, "start_rollout_id": plan.start_rollout_id}
            self._gang_started(Slot.CRITIC, gang, beginning | plan.critic.to_json())

    def _gang_started(self, role: Slot, gang: GangId, resume: Mapping[str, Any]) -> None:
        self.journal.append(
            "gang_started",
            role=role,
            incarnation=gang.incarnation,
            world_size=gang.world_size,
            config_hash=gang.config_hash,
            resume=dict(resume),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Journals how the run ended."""
        try:
            yield
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self.journal.append("run_ended", outcome="failed", reason=reason[:_KEPT])
            raise
        self.journal.append("run_ended", outcome="done")

    def _write_plan(self, plan: ResumePlan) -> None:
        _write(self.path / "resume.json", json.dumps(plan.to_json(), indent=2) + "\n")


def _incarnations(journal: Path) -> list[int]:
    """Those that began in it. `JournalDamaged` for an entry of them that does not say which."""
    known = []
    for entry in read_journal(journal):
        if entry["kind"] in _BEGIN:
            if wrong := fault(entry):
                raise JournalDamaged(f"{journal}: entry {entry['seq']} is {wrong}. Use another run.dir, or repair it")
            known.append(int(entry["incarnation"]))
    return known


def config_text(config: Config) -> str:
    """The resolved configuration as YAML: what `config.yaml` holds, byte for byte, at every start and end."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def config_hash(config: Config) -> str:
    """What every rank of a gang must have been configured with: 16 hex digits."""
    return hashlib.sha256(config_text(config).encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)
