"""Compares what the driver believes with what every rank and engine journaled. Ordered by transition numbers and
publish ids, never by clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from state import lifecycle
from state.entries import role_of
from state.findings import Entry, Notes
from state.rank_history import Outlet, RankHistory, RankLife
from state.replay_driver import PUBLISHED, DriverHistory, Start, weights
from state.replay_engines import EngineHistory
from state.slots import Slot

_NAMED = 8
"""Ranks that one finding names."""


def cross_check(
    driver: DriverHistory, ranks: Sequence[RankHistory], engines: Mapping[str, EngineHistory], notes: Notes
) -> None:
    """Note everything in which the journals contradict each other."""
    for history in ranks:
        for incarnation in history.lives.keys() - driver.starts.keys():
            what = f"{history.name} was in incarnation {incarnation}, which the driver does not know"
            notes.wrong(history.journal, None, "I7", what)
    for start in driver.starts.values():
        for role in start.gangs.keys() | {Slot.ACTOR} | {h.role for h in ranks if start.incarnation in h.lives}:
            _Gang(driver, start, role, [h for h in ranks if h.role == role], notes).check()
    _check_engines(driver, engines, notes)


class _Gang:
    """One role in one incarnation: its driver's entries against its ranks'."""

    def __init__(
        self, driver: DriverHistory, start: Start, role: str, ranks: Sequence[RankHistory], notes: Notes
    ) -> None:
        self._driver, self._start, self._role, self._notes = driver, start, role, notes
        self._saves = {i: e for i, e in start.saves.items() if role_of(e) == role}
        self._begun = {i: e for i, e in start.begun.items() if role_of(e) == role}
        self._publishes = start.publishes if role == Slot.ACTOR else {}
        self._lives = {h.rank: (h, h.lives[start.incarnation]) for h in ranks if start.incarnation in h.lives}

    def check(self) -> None:
        if self._role in self._start.gangs:
            self._check_size(self._start.gangs[self._role].world_size)
        for publish in self._publishes.values():
            if "digest" in publish:
                self._check_outlet(publish, "publish", publish["outcome"] in PUBLISHED)
        for save in (self._begun | self._saves).values():
            self._check_outlet(save, "save", True)
        for publish_id in self._begun.keys() & self._saves.keys():
            self._check_written(publish_id)
        for rollout_id, trained in self._start.trained.items():
            self._check_trained(rollout_id, trained)
        for history, life in self._lives.values():
            self._check_known(history, life)

    def _check_size(self, world_size: int) -> None:
        if missing := [rank for rank in range(world_size) if rank not in self._lives]:
            names = ", ".join(f"{self._role}/{rank}" for rank in missing[:_NAMED])
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            have = f"{names}{more} {'has' if len(missing) == 1 else 'have'} no journal"
            what = f"{have} of incarnation {self._start.incarnation}, a gang of {world_size}"
            self._notes.wrong(self._driver.journal, None, "I12", what)
        for history, life in self._lives.values():
            if life.world_size != world_size or history.rank >= world_size:
                what = f"{history.name} was in a gang of {life.world_size}; the driver started one of {world_size}"
                self._notes.wrong(history.journal, life.identity["seq"], "I2", what)

    def _check_outlet(self, entry: Entry, purpose: str, required: bool) -> None:
        publish_id, transitions, summaries = entry["publish_id"], entry["transitions"], entry["summaries"]
        self._check_replicas(publish_id, summaries, entry.get("replicas", ()))
        for rank, (agreed, summary) in enumerate(zip(transitions, summaries, strict=False)):
            if rank not in self._lives:
                continue
            history, life = self._lives[rank]
            self._check_attested(history, life, entry, agreed, summary)
            outlet = life.outlets.get(publish_id)
            if outlet is None:
                if required:
                    lost = self._start.cut_short and life.torn and life.transition <= agreed
                    self._missing(history, lost, "I2", f"{history.name} has no {purpose} {publish_id}")
                continue
            if outlet.purpose != purpose:
                self._wrong(history, outlet.seq, "I2", f"{publish_id} is a {purpose}, not a {outlet.purpose}")
            if outlet.transition != agreed + 1:
                moved = f"{history.name} attested at transition {agreed} and let bytes out at {outlet.transition}"
                self._wrong(history, outlet.seq, "I2", f"{publish_id}: {moved}")
            if (outlet.version, outlet.digest) != (entry["version"], summary):
                held = f"{outlet.version} with digest {outlet.digest}"
                agreed_on = f"{entry['version']} with digest {summary}"
                self._wrong(history, outlet.seq, "I2", f"{publish_id}: {history.name} held {held}, not {agreed_on}")
            agreed_kept = {(k["slot"], k["version"]): _of(k["summaries"], rank) for k in entry.get("slots", [])}
            for slot, version in agreed_kept.keys() | outlet.kept.keys():
                found, wanted = outlet.kept.get((slot, version)), agreed_kept.get((slot, version))
                if found != wanted:
                    what = f"{slot}@{version} as {found or 'nothing'}, agreed on was {wanted or 'nothing'}"
                    self._wrong(history, outlet.seq, "I10", f"{publish_id}: {history.name} kept {what}")

    def _check_written(self, publish_id: str) -> None:
        """What was completed from the background was on disk on every rank before."""
        for history, life in self._lives.values():
            outlet = life.outlets.get(publish_id)
            if outlet is not None and not outlet.written:
                what = f"{publish_id} was completed, and {history.name} has not written its copy"
                self._missing(history, self._start.cut_short and life.torn, "I11", what)

    def _check_attested(self, history: RankHistory, life: RankLife, entry: Entry, agreed: int, summary: str) -> None:
        """What the gang agreed on is what the rank swore to, and was recorded to hold, at that transition."""
        held = life.numbered.get(agreed)
        if held is None:  # the journal was cut off before it
            return
        if life.watch.attested.get(agreed) != summary:
            sworn = life.watch.attested.get(agreed, "nothing")
            what = (
                f"{entry['publish_id']} was agreed on {summary} of {history.name}, which at {agreed} swore to {sworn}"
            )
            self._wrong(history, held["seq"], "I2", what)
        found = (held["after"], held.get("version"), held.get("digest"))
        if found != (lifecycle.resident(life.primary), entry["version"], summary):
            was = f"in {found[0]} with version {found[1]} and digest {found[2]}"
            what = f"version {entry['version']} with digest {summary} of {history.name}, which at {agreed} was {was}"
            self._wrong(history, held["seq"], "I2", f"{entry['publish_id']} was agreed on {what}")

    def _check_replicas(self, publish_id: str, summaries: Sequence[str], replicas: Sequence[int]) -> None:
        """Ranks that hold the same pieces hold the same bytes."""
        first: dict[int, int] = {}
        for rank, (number, summary) in enumerate(zip(replicas, summaries, strict=False)):
            other = first.setdefault(number, rank)
            if summaries[other] != summary:
                role = self._role
                held = f"{summary}, its replica {role}/{other} {summaries[other]}"
                self._notes.wrong(
                    self._driver.journal, None, "I2", f"{publish_id} was agreed on although {role}/{rank} held {held}"
                )

    def _check_behaviour(self, trained: Entry) -> None:
        """The old_actors that ranks computed with before they trained are the versions that generated the samples."""
        rollout_id, wanted = trained["rollout_id"], set(trained["behaviour"])
        used: set[int | None] = set()
        for history, life in self._lives.values():
            if Slot.OLD_ACTOR not in life.tiers or rollout_id not in life.watch.used:
                return
            borrowed = life.watch.used[rollout_id]
            # The actor itself is its own behaviour policy where it has not moved since.
            used |= borrowed | {life.watch.before.get(rollout_id)}
            for version in sorted(borrowed - wanted):
                made = " and ".join(map(str, sorted(wanted)))
                what = f"{history.name} took old_actor@{version} for the policy that made rollout {rollout_id}; it was"
                self._wrong(history, life.commits[rollout_id][0], "I9", f"{what} {made}")
        if self._lives and (missing := wanted - used):
            versions = " and ".join(map(str, sorted(missing)))
            names = ", ".join(history.name for history, _ in list(self._lives.values())[:5])
            what = f"none of {names} took old_actor@{versions} for the policy that made rollout {rollout_id}"
            what = f"{what}, and it was that"
            self._notes.wrong(self._driver.journal, trained["seq"], "I9", what)

    def _check_trained(self, rollout_id: int, trained: Entry) -> None:
        self._check_behaviour(trained)
        for history, life in self._lives.values():
            commit = life.commits.get(rollout_id)
            if commit is None:
                lost = self._start.cut_short and life.torn and rollout_id > max(life.commits, default=-1)
                self._missing(history, lost, "I4", f"{history.name} has no commit of rollout {rollout_id}, trained")
            elif commit[1] != trained["version"]:
                what = f"rollout {rollout_id} is version {commit[1]} here, {trained['version']} for the driver"
                self._wrong(history, commit[0], "I7", what)

    def _check_known(self, history: RankHistory, life: RankLife) -> None:
        """Nothing happened on a rank that the driver does not know of, but for the last thing before a kill."""
        last_id = next(reversed(life.outlets), None)
        for publish_id, outlet in life.outlets.items():
            cut = self._start.cut_short and publish_id == last_id
            if not self._knows(publish_id):
                what = f"{history.name} entered {outlet.purpose} {publish_id}, which the driver does not know"
                self._unless(cut, history, outlet.seq, "I2", what)
            if not outlet.ended:
                what = f"{history.name} never left {outlet.purpose} {publish_id}"
                self._unless(cut and self._stopped_inside(life, outlet), history, outlet.seq, "I2", what)
        for rollout_id, (seq, _) in life.commits.items():
            if rollout_id not in self._start.trained:
                what = f"{history.name} committed rollout {rollout_id}, which the driver does not know as trained"
                self._unless(self._start.cut_short and rollout_id == max(life.commits), history, seq, "I4", what)
        if (life.state in ("stepping", "loading", "switching") or life.watch.lent is not None) and life.moments:
            what = f"incarnation {life.incarnation} of {history.name} ends in {life.state}"
            self._unless(self._start.cut_short, history, life.last["seq"], "I12", what)

    def _knows(self, publish_id: str) -> bool:
        publish = self._publishes.get(publish_id)
        saves = self._saves.keys() | self._begun.keys()
        return publish_id in saves or (publish is not None and "digest" in publish)

    @staticmethod
    def _stopped_inside(life: RankLife, outlet: Outlet) -> bool:
        return life.transition == outlet.transition

    def _wrong(self, history: RankHistory, seq: int | None, invariant: str, what: str) -> None:
        self._notes.wrong(history.journal, seq, invariant, what)

    def _missing(self, history: RankHistory, lost: bool, invariant: str, what: str) -> None:
        self._unless(lost, history, None, invariant, what)

    def _unless(self, excused: bool, history: RankHistory, seq: int | None, invariant: str, what: str) -> None:
        if excused:
            self._notes.event(history.journal, seq, f"{what}: the run was cut short there")
        else:
            self._wrong(history, seq, invariant, what)


def _of(summaries: Sequence[str], rank: int) -> str | None:
    return summaries[rank] if rank < len(summaries) else None


def _check_engines(driver: DriverHistory, engines: Mapping[str, EngineHistory], notes: Notes) -> None:
    published = {i: (start, p) for start in driver.starts.values() for i, p in start.publishes.items()}
    cut_short = any(start.cut_short for start in driver.starts.values())
    for history in engines.values():
        for life in history.lives:
            commits = [entry for entry in life if entry["trigger"] == "commit"]
            for entry in commits:
                fault = _commit_fault(history, entry, published)
                if fault is None:
                    continue
                known = published.get(entry["publish_id"])
                unfinished = known is None or known[1]["outcome"] == "aborted"
                short = cut_short if known is None else known[0].cut_short
                what = f"{history.engine} {fault}"
                if unfinished and short and entry is commits[-1]:
                    notes.event(history.journal, entry["seq"], f"{what}: the run was cut short there")
                else:
                    notes.wrong(history.journal, entry["seq"], "I7", what)
    for publish_id, (start, publish) in published.items():
        if publish["outcome"] == "committed":
            _check_verdicts(driver, start, publish_id, publish, engines, notes)


def _commit_fault(history: EngineHistory, entry: Entry, published: Mapping[str, tuple[Start, Entry]]) -> str | None:
    publish_id, served = entry["publish_id"], f"{entry['incarnation']}.{entry['version']}"
    if publish_id not in published:
        return f"serves {served} of {publish_id}, which the driver does not know"
    publish = published[publish_id][1]
    if publish["outcome"] != "committed":
        return f"serves {served} of {publish_id}, which was {publish['outcome']}"
    if served != str(weights(publish)):
        return f"serves {served} after {publish_id}, which published {weights(publish)}"
    proof = history.proofs.get(publish_id)
    if proof != publish["digest"]:
        held = "nothing was proven" if proof is None else f"it was found to hold {proof}"
        return f"serves {served} of {publish_id}, which published {publish['digest']}; {held}"
    verdict = publish["engines"].get(history.engine)
    return None if verdict == "committed" else f"serves {served} of {publish_id}, where the driver found it {verdict}"


def _check_verdicts(
    driver: DriverHistory,
    start: Start,
    publish_id: str,
    publish: Entry,
    engines: Mapping[str, EngineHistory],
    notes: Notes,
) -> None:
    for engine, verdict in publish["engines"].items():
        history = engines.get(engine)
        commit, left = history.outcome(publish_id) if history is not None else (None, None)
        if verdict != "committed" or commit is not None or left is not None:
            continue
        what = f"{publish_id} was committed to {engine}, which has no entry of it"
        if start.cut_short and history is not None and history.torn:
            notes.event(driver.journal, publish["seq"], f"{what}: the run was cut short there")
        else:
            notes.wrong(driver.journal, publish["seq"], "I7", what)
