"""What a run exports: from journal entries to gauges that stay, and nothing that could fail a run."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generated_run import generate
from state.journal import Journal
from workers import state_log
from workers.metric_names import METRICS, Metric, Update, of_step, updates
from workers.metrics import MetricSink

RANK = {"run": "r", "role": "actor", "rank": "3"}


def transition(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "transition", "source": "actor/3", "run": "r", "role": "actor", "rank": 3, "incarnation": 2,
        "transition": 7, "trigger": "switched", "before": "switching", "after": "resident.ref", "slot": "ref",
        "version": 0, "digest": "d1",
    } | fields  # fmt: skip


class Exported:
    """Takes what Ray would export; `broken` names raise. `set_again` is set at the second `set` of a series."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.sets: dict[str, int] = {}
        self.set_again = threading.Event()
        self._broken = broken

    def __call__(self, name: str, metric: Metric) -> Any:
        exported = self

        class One:
            def set(self, value: float, tags: dict[str, str]) -> None:
                exported.check(name, metric, tags)
                exported.values[name, tuple(sorted(tags.items()))] = value
                exported.sets[name] = exported.sets.get(name, 0) + 1
                if exported.sets[name] > 1:
                    exported.set_again.set()

            def inc(self, value: float, tags: dict[str, str]) -> None:
                exported.check(name, metric, tags)
                key = name, tuple(sorted(tags.items()))
                exported.values[key] = exported.values.get(key, 0.0) + value

        return One()

    def check(self, name: str, metric: Metric, tags: dict[str, str]) -> None:
        if name in self._broken:
            raise ValueError("Ray would not have it")
        assert set(tags) == set(metric.labels), "Ray demands a value for each label"

    def of(self, name: str, **labels: str) -> float | None:
        return self.values.get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def exported() -> Exported:
    return Exported()


@pytest.fixture
def sink(exported: Exported) -> Any:
    sink = MetricSink("r", reset_every_s=3600.0, export=exported)
    yield sink
    sink.close()


def test_exactly_one_slot_and_state_of_a_rank_is_1(sink: MetricSink, exported: Exported) -> None:
    sink.journaled(transition())
    sink.journaled(transition(slot="actor", after="resident.actor", version=4))
    sink.journaled(transition(rank=4))
    state = "slotwise_slot_state"
    assert exported.of(state, **RANK, slot="ref", state="resident") == 0
    assert exported.of(state, **RANK, slot="actor", state="resident") == 1
    assert exported.of(state, **RANK | {"rank": "4"}, slot="ref", state="resident") == 1
    assert exported.of("slotwise_slot_version", **RANK) == 4
    assert exported.of("slotwise_transitions_total", **RANK, trigger="switched") == 2


def test_the_version_of_another_slot_is_not_taken_for_the_actors() -> None:
    assert "slotwise_slot_version" not in [update.name for update in updates("r", transition(version=9))]


def test_a_checkpoint_of_actor_and_critic_is_counted_once() -> None:
    counted = [updates("r", {"kind": "save", "role": role}) for role in ("critic", "actor")]
    assert counted == [(), (Update("slotwise_saves_total", {"run": "r"}, 1),)]


def test_engines_publishes_and_steps_are_told(sink: MetricSink, exported: Exported) -> None:
    engine = {"kind": "engine", "engine": "r/engine/1", "state": "serving", "version": 4}
    sink.journaled(engine)
    sink.journaled(engine | {"state": "updating", "version": None})
    sink.journaled({"kind": "publish", "outcome": "committed", "version": 4})
    sink.journaled({"kind": "publish", "outcome": "refused"})
    sink.journaled({"kind": "trained", "at": 12.5})
    sink.take(of_step("r", {"reward/mean": 0.5, "train/kl_loss": None}))
    assert exported.of("slotwise_engine_state", run="r", engine="1", state="serving") == 0
    assert exported.of("slotwise_engine_state", run="r", engine="1", state="updating") == 1
    assert exported.of("slotwise_published_version", run="r") == 4
    assert exported.of("slotwise_publishes_total", run="r", outcome="refused") == 1
    assert exported.of("slotwise_last_step_timestamp_seconds", run="r") == 12.5
    assert exported.of("slotwise_reward_mean", run="r") == 0.5
    assert exported.of("slotwise_kl_loss", run="r") is None


def test_gauges_are_set_again_while_they_hold_and_not_afterwards(exported: Exported) -> None:
    sink = MetricSink("r", reset_every_s=0.01, export=exported)
    sink.take([Update("slotwise_grad_norm", {"run": "r"}, 1.0)])
    assert exported.set_again.wait(10), "Ray forgets a gauge that is not set again"
    sink.take([Update("slotwise_grad_norm", {"run": "r"}, None)])
    sink.close()
    sets = exported.sets["slotwise_grad_norm"]
    sink._timer.join(1)
    assert exported.sets["slotwise_grad_norm"] == sets


def test_nothing_that_fails_in_here_reaches_the_run(caplog: pytest.LogCaptureFixture) -> None:
    exported = Exported(broken=("slotwise_slot_state",))
    sink = MetricSink("r", reset_every_s=3600.0, export=exported)
    with caplog.at_level(logging.WARNING, "slotwise"):
        for _ in range(3):
            sink.journaled(transition(slot="actor", after="resident.actor", version=4))
            sink.journaled({"kind": "transition"})
            sink.take([Update("no such metric", {}, 1.0)])
    sink.close()
    assert exported.of("slotwise_slot_version", **RANK) == 4, "the others go on"
    assert len(caplog.records) == 3, "one complaint for each"


def test_a_whole_run_needs_no_other_metric_or_label(sink: MetricSink, exported: Exported, tmp_path: Path) -> None:
    run = generate(4, 2, 6, 1.8e9, trouble=True)
    for journal in (run.driver, run.fleet, *(rank.journal for rank in run.ranks)):
        for line in journal.lines:
            sink.journaled(json.loads(line))
    names = {name for name, _ in exported.values}
    assert names == {name for name in METRICS if name not in {u.name for u in of_step("r", {})}}
    assert len(exported.values) < 150, "series do not grow with the steps"


def test_a_journal_tells_its_listeners_what_it_has_written(tmp_path: Path) -> None:
    journal, heard = Journal(tmp_path / "x.jsonl", "x"), []
    journal.append("before")
    journal.listen(heard.append)
    entry = journal.append("after", a=1)
    assert heard == [entry]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (transition(), "actor/3 #7 switched: switching -> resident.ref, ref@0 d1"),
        (transition(version=None, digest=None, trigger="fail", after="poisoned", detail="while switching: boom"),
         "actor/3 #7 fail: switching -> poisoned, ref (while switching: boom)"),
        (transition(trigger="publish", after="publishing", publish_id="publish-1-2"),
         "actor/3 #7 publish: switching -> publishing, ref@0 d1 publish-1-2"),
        ({"kind": "refusal", "source": "actor/3", "state": "cold", "what": "train"}, "actor/3 refused in cold: train"),
        ({"kind": "engine", "engine": "r/engine/0", "transition": 2, "trigger": "commit", "before": "updating",
          "state": "serving", "incarnation": 1, "version": 4, "reason": None},
         "r/engine/0 #2 commit: updating -> serving, weights 1.4"),
        ({"kind": "trained"}, None),
    ],
)  # fmt: skip
def test_a_line_of_the_log_says_it_all(entry: dict[str, Any], said: str | None) -> None:
    assert state_log.line(entry) == said
