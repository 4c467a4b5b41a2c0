"""What the page knows of a run, read from journals that may still be growing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks.generated_run import generate
from orchestrator.inspector import telling
from orchestrator.inspector.codes import CODES, NONE
from orchestrator.inspector.history import History
from orchestrator.inspector.lanes import Lane
from orchestrator.inspector.raster import Segments, Window
from orchestrator.inspector.tail import Tail
from state.audit import audit, latest_views
from tests.state.toy_run import whole_run

BEGAN = 1.8e9


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two incarnations of 8 ranks: an aborted publish, a refusal, and a poisoning that ends the first."""
    directory = tmp_path_factory.mktemp("troubled") / "run"
    generate(8, 2, 8, BEGAN, trouble=True).write(directory)
    return directory


def history_of(run_dir: Path) -> History:
    history = History(run_dir)
    history.refresh()
    return history


def lane(history: History, name: str) -> Lane:
    return next(lane for lane in history.lanes if lane.name == name)


def test_a_generated_run_is_a_run_that_could_have_been(troubled: Path) -> None:
    assert audit(troubled).ok


class TestTail:
    def test_only_whole_new_lines_are_read(self, tmp_path: Path) -> None:
        tail = Tail(tmp_path / "x.jsonl")
        assert tail.read() == []
        with tail.path.open("w") as file:
            file.write('{"a": "é"}\n{"a": ')
            file.flush()
            assert [line.entry for line in tail.read()] == [{"a": "é"}]
            assert tail.read() == []
            file.write("2}\n")
        (line,) = tail.read()
        assert (line.entry, tail.at(line.offset)) == ({"a": 2}, {"a": 2})

    def test_damaged_lines_are_counted_and_skipped(self, tmp_path: Path) -> None:
        tail = Tail(tmp_path / "x.jsonl")
        tail.path.write_bytes(b'{"a": 1}\nnonsense\n[]\n\xff\n{"a": 2}\n')
        assert [line.entry["a"] for line in tail.read()] == [1, 2]
        assert tail.damaged == 3

    @pytest.mark.parametrize("replace", [True, False], ids=["replaced", "cut"])
    def test_another_file_of_that_name_is_read_from_its_start(self, tmp_path: Path, replace: bool) -> None:
        tail = Tail(tmp_path / "x.jsonl")
        tail.path.write_text('{"a": 1}\n{"a": 2}\n')
        tail.read()
        if replace:
            (tmp_path / "y").write_text('{"a": 3}\n{"a": 4}\n{"a": 5}\n')
            os.replace(tmp_path / "y", tail.path)
        else:
            tail.path.write_text('{"a": 3}\n')
        assert tail.read()[0].entry == {"a": 3}
        assert tail.restarts == 1


def test_the_newest_state_is_what_an_audit_finds(troubled: Path, tmp_path: Path) -> None:
    whole_run(tmp_path)
    for run_dir in (troubled, tmp_path):
        replayed, ours = latest_views(run_dir), telling.rows(history_of(run_dir))
        for kind, key in (("workers", "worker"), ("engines", "engine")):
            expected = {row[key]: row for row in replayed[kind]}
            found = {row[key]: {name: row.get(name) for name in expected[row[key]]} for row in ours[kind]}
            assert found == expected


def test_reading_on_shows_the_same_as_reading_at_once(troubled: Path, tmp_path: Path) -> None:
    growing = tmp_path / "run"
    (growing / "journal").mkdir(parents=True)
    history = History(growing)
    files = {path.name: path.read_bytes() for path in sorted(troubled.glob("journal/*.jsonl"))}
    for part in range(1, 8):
        for name, content in files.items():
            (growing / "journal" / name).write_bytes(content[: len(content) * part // 7])
        assert history.refresh()
    assert not history.refresh()
    (growing / "metrics.jsonl").write_bytes((troubled / "metrics.jsonl").read_bytes())
    assert history.refresh()
    now = BEGAN + 1000
    assert telling.summary(history, now) == telling.summary(history_of(troubled), now)


def test_lanes_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    generate(11, 11, 1, BEGAN, trouble=False).write(tmp_path / "run")
    names = [lane.name for lane in history_of(tmp_path / "run").lanes]
    assert names[:11] == [f"actor/{rank}" for rank in range(11)]
    assert [name.rsplit("/", 1)[-1] for name in names[11:]] == [str(index) for index in range(11)]


def test_a_moment_says_digest_and_where_the_bytes_came_from(troubled: Path) -> None:
    history = history_of(troubled)
    rank = lane(history, "actor/3")
    told = [rank.tell(index) for index in range(len(rank.times))]
    borrowed = next(t for t in told if t["state"] == "resident.ref" and t["trigger"] == "switched")
    assert borrowed["provenance"] == "models/Qwen3-4B"
    assert borrowed["tier"] == "copy"
    assert len(borrowed["digest"]) == 16
    trained = [t for t in told if t["trigger"] == "step"]
    # Each step begins with the bytes that the one before it left; the first of an incarnation with what was loaded.
    assert [t["provenance"] for t in trained][:3] == ["models/Qwen3-4B", "step 0", "step 1"]
    assert trained[4]["provenance"] == "checkpoints @ 3"


def test_what_went_wrong_is_told_in_order_of_time_with_its_reason(troubled: Path) -> None:
    problems = history_of(troubled).problems
    assert [p["at"] for p in problems] == sorted(p["at"] for p in problems)
    told = {(p["lane"], p["what"]): p["reason"] for p in problems}
    assert "ECC" in told[("actor/5", "poisoned")]
    assert "a transition came in between" in told[("actor/2", "refused")]
    assert "EngineGone" in told[("driver", "publish aborted")]
    assert ("driver", "run failed") in told
    assert ("qwen3-grpo/engine/0", "dead") not in told, "an engine that was shut down is no trouble"


def test_colours_of_a_terminal_are_left_out_of_reasons(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    entries = [
        {"seq": 1, "kind": "driver_started", "at": 1.0, "incarnation": 1, "pid": 1, "start_rollout_id": None},
        {"seq": 2, "kind": "run_ended", "at": 2.0, "outcome": "failed", "reason": "\x1b[36mray::init()\x1b[39m"},
    ]
    (tmp_path / "journal" / "driver.jsonl").write_text(
        "".join(json.dumps(e | {"source": "driver"}) + "\n" for e in entries)
    )
    assert history_of(tmp_path).problems[0]["reason"] == "ray::init()"


def test_between_two_incarnations_a_lane_shows_nothing(troubled: Path) -> None:
    history = history_of(troubled)
    ended, began = history.starts[0].end, history.starts[1].at
    segments = Segments.of(history.lanes, *history.ends())
    assert ended is not None
    crossing = (segments.start < ended) & (segments.end > ended) & (segments.code != NONE)
    assert not crossing.any()
    assert ended < began


def test_a_killed_start_lasts_until_the_next_one_at_most(tmp_path: Path) -> None:
    whole_run(tmp_path)
    driver = tmp_path / "journal" / "driver.jsonl"
    lines = [line for line in driver.read_text().splitlines() if '"run_ended"' not in line]
    driver.write_text("\n".join(lines) + "\n")
    history = history_of(tmp_path)
    began, over = history.ends()
    assert list(over) == [began[1], math.inf]
    assert history.status() in ("running", "silent")


@pytest.mark.parametrize(("pid", "status"), [(os.getpid(), "running"), (2**22 + 1, "silent")], ids=["lives", "is gone"])
def test_a_run_without_an_end_runs_where_its_driver_does(tmp_path: Path, pid: int, status: str) -> None:
    generate(1, 1, 1, BEGAN, trouble=False, ended=False, pid=pid).write(tmp_path / "run")
    assert history_of(tmp_path / "run").status() == status


def test_metrics_stand_at_the_time_their_step_was_trained(troubled: Path) -> None:
    history = history_of(troubled)
    told = telling.metrics(history)
    # A row of nothing where the second incarnation began: no line is drawn across it.
    assert told["steps"] == [0, 1, 2, 3, None, 4, 5, 6, 7]
    assert told["times"] == [history.starts[1].at if step is None else history.trained[step] for step in told["steps"]]
    assert [column[4] for column in told["values"].values()] == [None] * 4
    assert set(told["values"]) == {"reward/mean", "train/kl_loss", "train/grad_norm", "perf/step_s"}


def test_of_many_publishes_a_column_shows_the_last_and_every_failed_one(troubled: Path) -> None:
    history = history_of(troubled)
    assert history.first is not None
    assert history.last is not None
    marks = telling.marks(history, Window(history.first, history.last, 2))
    assert [m["outcome"] for m in marks].count("committed") == 2
    assert [m["publish_id"] for m in marks if m["outcome"] == "aborted"] == ["publish-1-4"]


class TestHeadline:
    def row(self, rank: int, state: str, slot: str | None = None, role: str = "actor") -> dict[str, object]:
        return {"worker": f"r/{role}/{rank}", "role": role, "state": state, "slot": slot}

    def test_of_a_gang_that_agrees(self) -> None:
        rows = [self.row(r, "resident.actor", "actor") for r in range(8)]
        assert telling.resident(rows, True) == {"text": "actor on all 8 ranks", "tone": "good"}

    def test_of_a_borrow(self) -> None:
        rows = [
            self.row(0, "resident.ref", "ref"),
            self.row(1, "stepping", "actor"),
            self.row(2, "publishing", "actor"),
        ]
        assert telling.resident(rows, True) == {"text": "actor on 2, ref on 1", "tone": "busy"}

    def test_of_two_roles(self) -> None:
        rows = [self.row(0, "resident.actor", "actor"), self.row(0, "stepping", "critic", role="critic")]
        assert telling.resident(rows, True) == {"text": "actor on 1, critic on 1", "tone": "good"}

    def test_of_a_poisoned_rank(self) -> None:
        rows = [self.row(0, "resident.actor", "actor"), *(self.row(r, "poisoned") for r in (1, 2, 3, 4))]
        assert telling.resident(rows, True)["text"] == "actor/1, actor/2, actor/3 and 1 more are poisoned"
        assert telling.resident(rows, True)["tone"] == "bad"

    def test_of_engines_that_are_behind(self) -> None:
        newest = {"incarnation": 1, "version": 4}
        serving = {"engine": "e/0", "state": "serving", "incarnation": 1, "version": 4, "reason": None}
        old = serving | {"engine": "e/1", "version": 3}
        stale = serving | {"engine": "e/2", "state": "stale", "version": None, "incarnation": None}
        said = telling.serving([serving, old, stale], newest)
        assert said == {"text": "1 of 3 serving, 1 behind, 1 stale", "tone": "busy"}
        assert telling.serving([stale], newest)["tone"] == "bad"
        assert telling.serving([serving], newest) == {"text": "1 of 1 serving", "tone": "good"}


@pytest.mark.parametrize(("asked", "ranks"), [("", range(8)), ("1-2, 5", (1, 2, 5)), ("7-99", (7,)), ("44", ())])
def test_ranks_can_be_chosen(troubled: Path, asked: str, ranks: range | tuple[int, ...]) -> None:
    history = history_of(troubled)
    names = [history.lanes[i].name for i in telling.chosen(history, asked)]
    assert names == [*(f"actor/{rank}" for rank in ranks), "qwen3-grpo/engine/0", "qwen3-grpo/engine/1"]


@pytest.mark.parametrize("asked", ["x", "-3", "1-x", "1;2"])
def test_a_choice_that_is_none_is_refused(troubled: Path, asked: str) -> None:
    with pytest.raises(ValueError, match="neither a rank nor a range"):
        telling.chosen(history_of(troubled), asked)


def test_every_state_of_a_worker_and_of_an_engine_has_a_colour() -> None:
    from orchestrator.inspector import server
    from state.engine_life import EnginePhase
    from state.lifecycle import TABLE
    from state.slots import Slot

    states = {destination for _, _, destination in TABLE if "{" not in destination} | {
        phase.value for phase in EnginePhase
    }
    assert states | {str(slot) for slot in Slot} <= {*CODES, "resident.actor"}
    css = (server.STATIC / "page.css").read_text()
    assert [name for name in CODES if css.count(f"--{name}: #") != 2] == [], "each once for light and once for dark"
