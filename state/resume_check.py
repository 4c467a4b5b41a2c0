"""Compares each start of a run with the plan that it was made by, and with the save that it continues from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from state import checkpoints
from state.findings import Entry, Notes
from state.rank_history import RankHistory, RankLife
from state.replay_driver import DriverHistory, Resume, Start
from state.slots import Slot


def resume_check(driver: DriverHistory, ranks: Sequence[RankHistory], notes: Notes) -> None:
    """Note everything that a start did not take up where it had to."""
    earlier: list[Start] = []
    for start in driver.starts.values():
        for role, gang in start.gangs.items():
            lives = [(h, h.lives[start.incarnation]) for h in ranks if h.role == role and start.incarnation in h.lives]
            _Resumed(driver, start, role, gang.resume, lives, notes).check(_save_of(gang.resume, earlier))
        earlier.append(start)


def _save_of(resume: Resume, earlier: Sequence[Start]) -> Entry | None:
    """The entry of the save that `resume` continues with its optimizer, where this run made it and said so."""
    if not resume.with_optimizer or resume.root is None or resume.iteration is None:
        return None
    path = checkpoints.iteration_dir(resume.root, resume.iteration)
    for start in reversed(earlier):
        for save in reversed(start.saves.values()):
            if Path(save["path"]) == path:
                return save
        if resume.iteration in start.trained:  # and killed before it could say that it had saved it
            return None
    return None


class _Resumed:
    def __init__(
        self,
        driver: DriverHistory,
        start: Start,
        role: str,
        resume: Resume,
        lives: Sequence[tuple[RankHistory, RankLife]],
        notes: Notes,
    ) -> None:
        self._driver, self._start, self._role, self._resume = driver, start, role, resume
        self._lives, self._notes = lives, notes

    def check(self, saved: Entry | None) -> None:
        self._check_beginning()
        if saved is not None:
            self._check_slots(saved)
            self._check_bytes(saved)

    def _check_beginning(self) -> None:
        resume = self._resume
        trained_for = resume.iteration + 1 if resume.with_optimizer and resume.iteration is not None else 0
        begins = trained_for if self._start.asked_start is None else self._start.asked_start
        if resume.begins != begins:
            self._wrong(f"starts at rollout {resume.begins}; with {resume.source} weights that is {begins}")
        first = next(iter(self._start.trained), begins)
        if first != begins:
            self._wrong(f"trains rollout {first} first; it starts at {begins}")
        for history, life in self._lives:
            filled = {version for slot, version in life.watch.loaded if slot is life.primary}
            if filled and filled != {trained_for}:
                named = " and ".join(f"{life.primary}@{version}" for version in sorted(filled))
                self._wrong(
                    f"{history.name} was filled with {named}; the plan is {life.primary}@{trained_for}", history
                )

    def _check_slots(self, saved: Entry) -> None:
        """Slots that a checkpoint must hold come back as the versions that it holds."""
        for history, life in self._lives:
            held = {(Slot(one["slot"]), int(one["version"])) for one in saved["slots"]}
            wanted = {one for one in held if one[0] in life.watch.kept}
            found = {one for one in life.watch.loaded if one[0] in life.watch.kept and one[0] in {s for s, _ in held}}
            if found != wanted and life.ready:
                names = [" and ".join(f"{s}@{v}" for s, v in sorted(some)) or "none" for some in (found, wanted)]
                self._wrong(
                    f"{history.name} came back with {names[0]}; {saved['publish_id']} holds {names[1]}", history
                )

    def _check_bytes(self, saved: Entry) -> None:
        """What the gang swore to before it began, against what was sworn to when it was saved."""
        digests = {self._role: saved["digest"]} | {f"{s['slot']}@{s['version']}": s["digest"] for s in saved["slots"]}
        for name, digest in (self._start.held or {}).items():
            if name in digests and digests[name] != digest:
                self._wrong(f"holds {name} with digest {digest}; {saved['publish_id']} saved {digests[name]}")

    def _wrong(self, what: str, history: RankHistory | None = None) -> None:
        journal = self._driver.journal if history is None else history.journal
        self._notes.wrong(journal, None, "I10", f"incarnation {self._start.incarnation} {what}")
