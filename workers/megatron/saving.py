"""How one rank lets its weights out to disk: checkpoints, at once or in the background, and exports.

A save in the background copies inside the scope of the permit, so that what is copied is what was agreed on, and writes
the copy on a thread while the gang goes on:

    save(quorum, path, background=True) -> written -> end       at most one at a time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Module

from state import checkpoints
from state.errors import SlotwiseError
from state.gang import Quorum
from state.journal import Journal
from state.machine import SlotMachine
from state.slots import Slot
from workers.megatron import checkpoint, hf_io
from workers.megatron.convert import HUGGINGFACE
from workers.megatron.hf_export import export_weights
from workers.megatron.hf_layout import GptWeights
from workers.megatron.optimizer import TrainOptimizer
from workers.megatron.spec import WorkerSpec
from workers.megatron.torch_dist import CopyNow, PrivateCopy, WriteNow

Written = list[list[WriteResult]]
"""What one rank wrote, for each directory of a save."""


class WriteFailed(SlotwiseError):
    """A save in the background did not reach the disk; what it was to replace still stands."""


class Saver:
    """Called inside `cpu.redirect`, one call at a time, except `written` and `end`, which take any thread."""

    def __init__(
        self,
        spec: WorkerSpec,
        model: Module,
        weights: GptWeights,
        optimizer: TrainOptimizer,
        machine: SlotMachine,
        journal: Journal,
    ) -> None:
        self._spec, self._model, self._weights, self._optimizer = spec, model, weights, optimizer
        self._machine, self._journal = machine, journal
        self._background: _Background | None = None

    def save(self, quorum: Quorum, path: Path, *, background: bool) -> None:
        """This rank's part of a checkpoint: the primary, and the slots that change during a run.

        In the background, files are whole only after `written` on every rank and `end` on rank 0.
        """
        if self._background is not None:
            raise RuntimeError(
                f"{self._spec.worker} was asked for {quorum.publish_id} while {self._background.publish_id} is written"
            )
        model, by = self._model, CopyNow() if background else WriteNow()
        with self._machine.saving(quorum) as permit:
            checkpoint.save_state(path, model, self._optimizer, permit=permit, by=by)
            for kept in self._machine.kept:
                with self._machine.reading(permit, kept.slot, kept.version):
                    part = checkpoints.slot_part(kept.slot, kept.version)
                    checkpoint.save_slot(path / part, model, permit=permit, by=by)
            if self._machine.primary is Slot.ACTOR:  # a critic is no language model
                self._describe(path / HUGGINGFACE)
        if isinstance(by, CopyNow):
            self._background = _Background(self._spec, quorum.publish_id, by.copies, self._journal)

    def written(self, publish_id: str) -> Written:
        """Waits until this rank's part of a save in the background is on disk. Raises what kept it from that."""
        return self._under_way(publish_id).wait(self._spec.train.timeout_s)

    def end(self, publish_id: str, everyone: Sequence[Written]) -> None:
        """Every rank has written: `everyone`, by rank. Rank 0 writes the index of each directory."""
        background = self._under_way(publish_id)
        if self._spec.worker.rank == 0:
            background.complete(everyone)
        self._background = None

    def export(self, quorum: Quorum, path: Path) -> None:
        """This rank's part of a Hugging Face directory."""
        spec = self._spec
        with self._machine.saving(quorum) as permit:
            export_weights(
                self._weights,
                path,
                permit=permit,
                rank=spec.worker.rank,
                file_bytes=spec.weights.bucket_bytes,
                timeout_s=spec.weights.timeout_s,
            )
            self._describe(path)

    def _describe(self, path: Path) -> None:
        if self._spec.worker.rank == 0:
            model = self._spec.model
            files_from = model.tokenizer or model.hf_checkpoint
            hf_io.describe(self._weights.hf_config, model.dtype, path, files_from=files_from)

    def _under_way(self, publish_id: str) -> _Background:
        if self._background is None or self._background.publish_id != publish_id:
            instead = "nothing" if self._background is None else self._background.publish_id
            raise RuntimeError(f"{self._spec.worker} was asked about {publish_id} while it writes {instead}")
        return self._background


class _Background:
    """The copies of one save on their way to disk. Journals how that ended."""

    def __init__(self, spec: WorkerSpec, publish_id: str, copies: Sequence[PrivateCopy], journal: Journal) -> None:
        self.publish_id = publish_id
        self._worker, self._incarnation = spec.worker, spec.gang.incarnation
        self._copies, self._journal = copies, journal
        self._results: Written = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name=publish_id, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> Written:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WriteFailed(f"{self._worker} has not written {self.publish_id} within {timeout_s:g} s")
        if self._error is not None:
            raise WriteFailed(f"{self._worker} could not write {self.publish_id}: {_words(self._error)}")
        return self._results

    def complete(self, everyone: Sequence[Written]) -> None:
        for copy, results in zip(self._copies, zip(*everyone, strict=True), strict=True):
            copy.complete(results)

    def _write(self) -> None:
        began, nbytes = time.perf_counter(), sum(copy.nbytes for copy in self._copies)
        try:
            self._results = [copy.write() for copy in self._copies]
        except BaseException as error:
            self._error = error
            self._record("write_failed", reason=_words(error))
        else:
            self._record("written", nbytes=nbytes, seconds=round(time.perf_counter() - began, 3))

    def _record(self, kind: str, **more: object) -> None:
        worker = self._worker
        identity = {"role": worker.role, "rank": worker.rank, "incarnation": self._incarnation}
        self._journal.append(kind, **identity, publish_id=self.publish_id, **more)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
