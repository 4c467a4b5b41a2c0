"""Writes the journals of a run that never was: `python -m benchmarks.generated_run OUT --ranks 512 --trouble`.

Its ranks and engines do what real ones do, in that order and at believable times, and it passes `slotwise audit`. With
`--trouble` one publish is aborted, one rank refuses, and one is poisoned, which ends the first incarnation.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from state.resume import LoadSpec, ResumePlan
from state.slots import Provenance

RUN = "qwen3-grpo"


@dataclass
class Journal:
    """Lines of one file."""

    source: str
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, at: float, **fields: Any) -> None:
        entry = {"seq": len(self.lines) + 1, "kind": kind, "source": self.source, "at": round(at, 6), **fields}
        self.lines.append(json.dumps(entry, separators=(",", ":")))


class Rank:
    def __init__(self, rank: int, world: int, noise: random.Random) -> None:
        self.journal = Journal(f"actor/{rank}")
        self._who = {"run": RUN, "role": "actor", "rank": rank, "world_size": world}
        self._noise, self._rank = noise, rank

    def start(self, at: float, incarnation: int, version: int) -> None:
        self._who = self._who | {"incarnation": incarnation}
        self._transition, self._state, self.version = 0, "cold", version
        at += self._noise.uniform(0, 1.5)
        tiers = {"actor": "copy", "ref": "copy"}
        self.journal.add("created", at, **self._who, slots=tiers, primary="actor", kept=[])
        source = f"checkpoints @ {version - 1}" if version else str(Provenance.huggingface("models/Qwen3-4B"))
        self.move(at + 0.2, "load", "loading", "actor", record=False, provenance=source)
        self.move(at + 6 + self._noise.uniform(0, 1), "loaded", "resident.actor", "actor")
        self.move(at + 7.2, "load", "loading", "ref", record=False, provenance="models/Qwen3-4B")
        self.move(at + 12 + self._noise.uniform(0, 1), "loaded", "resident.ref", "ref")
        self.move(at + 13.1, "switch", "switching", "actor", record=False)
        self.move(at + 13.4, "switched", "resident.actor", "actor")
        self.move(at + 13.5, "ready", "resident.actor", "actor")

    def borrow(self, at: float, seconds: float) -> float:
        switch = 0.15
        self.move(at, "switch", "switching", "ref", record=False)
        self.move(at + switch, "switched", "resident.ref", "ref")
        end = at + switch + seconds * self._noise.uniform(0.92, 1.0)
        self.move(end, "switch", "switching", "actor", record=False)
        self.move(end + switch, "switched", "resident.actor", "actor")
        return end + switch

    def train(self, at: float, seconds: float, rollout_id: int) -> None:
        self.move(at, "step", "stepping", "actor", rollout_id=rollout_id)
        self.version = rollout_id + 1
        end = at + seconds * self._noise.uniform(0.96, 1.0)
        self.move(end, "commit", "resident.actor", "actor", rollout_id=rollout_id, wrote=True)

    def outlet(self, at: float, seconds: float, trigger: str, publish_id: str) -> None:
        self.attest(at - 0.05)
        self.move(at, trigger, "publishing" if trigger == "publish" else "saving", "actor", publish_id=publish_id)
        self.move(at + seconds, "done", "resident.actor", "actor", publish_id=publish_id)

    def attest(self, at: float) -> None:
        about = {"version": self.version, "digest": digest("actor", self.version, self._rank)}
        sworn = {
            "transition": self._transition,
            "state": self._state,
            "slot": "actor",
            **about,
            "live": about["digest"],
        }
        self.journal.add("attested", at, **self._who, **sworn, changed=[], kept=[])

    def refuse(self, at: float, what: str) -> None:
        self.journal.add("refusal", at, **self._who, state=self._state, lent=False, what=what)

    def poison(self, at: float, reason: str) -> None:
        self.move(at, "switch", "switching", "ref", record=False)
        self.move(at + 0.1, "fail", "poisoned", "actor", record=False, detail=f"while switching: {reason}")

    def move(self, at: float, trigger: str, after: str, slot: str, record: bool = True, **fields: Any) -> None:
        self._transition += 1
        version = self.version if slot == "actor" else 0
        about = {"version": version, "digest": digest(slot, version, self._rank)} if record else {}
        if trigger in ("switched", "ready"):
            about["live"] = about["digest"]
        self.journal.add(
            "transition",
            at,
            **self._who,
            transition=self._transition,
            trigger=trigger,
            before=self._state,
            after=after,
            slot=slot,
            **about,
            **fields,
        )
        self._state = after

    @property
    def transition(self) -> int:
        return self._transition


class Engine:
    def __init__(self, index: int, journal: Journal) -> None:
        self.name, self._journal = f"{RUN}/engine/{index}", journal

    def start(self, at: float) -> None:
        self._transition, self._state = 0, "starting"
        self.move(at, "started", "stale", reason="never published to")

    def move(
        self, at: float, trigger: str, state: str, weights: tuple[int, int] | None = None, **fields: str | None
    ) -> None:
        self._transition += 1
        incarnation, version = weights or (None, None)
        about = {"publish_id": None, "reason": None} | fields
        self._journal.add(
            "engine",
            at,
            engine=self.name,
            transition=self._transition,
            trigger=trigger,
            before=self._state,
            state=state,
            incarnation=incarnation,
            version=version,
            **about,
        )
        self._state = state


class Run:
    def __init__(self, ranks: int, engines: int, began: float, pid: int) -> None:
        self._noise = random.Random(0)
        self.driver, self.fleet = Journal("driver"), Journal("fleet")
        self.ranks = [Rank(rank, ranks, self._noise) for rank in range(ranks)]
        self.engines = [Engine(index, self.fleet) for index in range(engines)]
        self.metrics: list[dict[str, float]] = []
        self.now, self._pid, self._incarnation, self._publishes = began, pid, 0, 0

    def start(self, version: int) -> None:
        self._incarnation += 1
        self._publishes = 0
        self.driver.add("driver_started", self.now, incarnation=self._incarnation, pid=self._pid, start_rollout_id=None)
        for rank in self.ranks:
            rank.start(self.now + 4, self._incarnation, version)
        for engine in self.engines:
            engine.start(self.now + 15 + self._noise.uniform(0, 3))
        self.now += 21
        self.driver.add(
            "gang_started",
            self.now,
            role="actor",
            incarnation=self._incarnation,
            world_size=len(self.ranks),
            config_hash="41bbce6c115b0e83",
            resume=_plan(version),
        )

    def rollout(self, rollout_id: int, save: bool) -> None:
        began = self.now
        self.now += self._noise.uniform(3.2, 4.8)
        ends = [rank.borrow(self.now + self._noise.uniform(0, 0.05), 1.9) for rank in self.ranks]
        self.now = max(ends) + 0.8
        for rank in self.ranks:
            rank.train(self.now, 4.2, rollout_id)
        self.now += 4.3
        about = {"incarnation": self._incarnation, "rollout_id": rollout_id, "version": rollout_id + 1}
        about |= {"behaviour": [rollout_id]}
        self.driver.add("trained", self.now, **about)
        self.metrics.append({"step": rollout_id, **_metrics(rollout_id, self._noise), "perf/step_s": self.now - began})
        if save:
            self.save(rollout_id)

    def publish(self, aborted: str | None = None) -> None:
        self._publishes += 1
        publish_id = f"publish-{self._incarnation}-{self._publishes}"
        transitions = [rank.transition for rank in self.ranks]
        self.now += 0.1
        for rank in self.ranks:
            rank.outlet(self.now, 1.1, "publish", publish_id)
        version = self.ranks[0].version
        for engine in self.engines:
            engine.move(self.now + 0.1, "begin_update", "updating", publish_id=publish_id)
        for engine in self.engines:
            if aborted:
                engine.move(self.now + 0.9, "abort", "stale", publish_id=None, reason=aborted)
            else:
                at = self.now + 0.9 + self._noise.uniform(0, 0.1)
                held = digest("actor", version, -1)
                self.fleet.add("proof", at - 0.05, engine=engine.name, publish_id=publish_id, digest=held)
                engine.move(at, "commit", "serving", (self._incarnation, version), publish_id=publish_id)
        self.now += 1.2
        verdict = f"torn: {aborted}" if aborted else "committed"
        self._record(
            "publish",
            publish_id,
            transitions,
            {"engines": {e.name: verdict for e in self.engines}}
            | ({"outcome": "aborted", "reason": aborted} if aborted else {"outcome": "committed"}),
        )

    def save(self, rollout_id: int) -> None:
        publish_id = f"save-{self._incarnation}-{rollout_id}"
        transitions = [rank.transition for rank in self.ranks]
        for rank in self.ranks:
            rank.outlet(self.now + 0.05, self._noise.uniform(1.6, 2.2), "save", publish_id)
        self.now += 2.4
        path = f"checkpoints/iter_{rollout_id:07d}"
        self._record("save", publish_id, transitions, {"iteration": rollout_id, "path": path, "slots": []})

    def end(self, reason: str | None = None) -> None:
        self.now += 0.5
        outcome = {"outcome": "done"} if reason is None else {"outcome": "failed", "reason": reason}
        self.driver.add("run_ended", self.now, incarnation=self._incarnation, **outcome)
        for engine in self.engines:
            engine.move(self.now - 0.1, "die", "dead", reason="shut down")
        self.now += 6

    def _record(self, kind: str, publish_id: str, transitions: list[int], fields: dict[str, Any]) -> None:
        version = self.ranks[0].version
        self.driver.add(
            kind,
            self.now,
            publish_id=publish_id,
            slot="actor",
            incarnation=self._incarnation,
            version=version,
            digest=digest("actor", version, -1),
            world_size=len(self.ranks),
            transitions=transitions,
            summaries=[digest("actor", version, rank) for rank in range(len(self.ranks))],
            **fields,
        )

    def write(self, directory: Path) -> None:
        (directory / "journal").mkdir(parents=True)
        journals = {"driver": self.driver, "fleet": self.fleet}
        journals |= {f"actor-{index}": rank.journal for index, rank in enumerate(self.ranks)}
        for name, journal in journals.items():
            (directory / "journal" / f"{name}.jsonl").write_text("\n".join(journal.lines) + "\n")
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.metrics))


def digest(slot: str, version: int, rank: int) -> str:
    """Of the shard of one rank; 16 hex digits."""
    return f"{random.Random(f'{slot}{version}{rank}').getrandbits(64):016x}"


def _plan(version: int) -> dict[str, Any]:
    if not version:
        spec = LoadSpec("models/Qwen3-4B", None, "huggingface")
        return ResumePlan("fresh", spec, 0, False, False, False, "nothing was saved").to_json()
    spec = LoadSpec("checkpoints", version - 1, "native")
    return ResumePlan("native", spec, version, True, True, True, f"the tracker names {version - 1}").to_json()


def _metrics(step: int, noise: random.Random) -> dict[str, float]:
    grown = 1 - math.exp(-step / 14)
    return {
        "reward/mean": 0.12 + 0.74 * grown + noise.gauss(0, 0.02),
        "train/kl_loss": 0.004 + 0.05 * grown + abs(noise.gauss(0, 0.003)),
        "train/grad_norm": 0.35 + 0.8 * math.exp(-step / 9) + abs(noise.gauss(0, 0.05)),
    }


def generate(
    ranks: int, engines: int, rollouts: int, began: float, *, trouble: bool, ended: bool = True, pid: int = 1
) -> Run:
    """A run of `rollouts` steps; with `trouble` they are spread over two incarnations."""
    run = Run(ranks, engines, began, pid)
    run.start(0)
    run.publish()
    first = 0
    if trouble:
        half = rollouts // 2
        for rollout_id in range(half):
            run.rollout(rollout_id, save=rollout_id % 5 == 4 or rollout_id == half - 1)
            run.publish(aborted="EngineGone: the engine's process is no more" if rollout_id == half // 2 else None)
        sick = run.ranks[min(ranks - 1, ranks * 5 // 8)]
        run.ranks[ranks // 4].refuse(run.now + 0.5, "attest: a transition came in between")
        sick.poison(run.now + 2.2, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
        run.now += 9
        run.end(f"WorkerFailed: {sick.journal.source} failed to train: it is poisoned")
        run.start(half)
        run.publish()
        first = half
    for rollout_id in range(first, rollouts):
        run.rollout(rollout_id, save=rollout_id % 5 == 4)
        run.publish()
    if ended:
        run.end()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--trouble", action="store_true")
    options = parser.parse_args()
    generate(options.ranks, options.engines, options.rollouts, 1.8e9, trouble=options.trouble).write(options.out)


if __name__ == "__main__":
    main()
