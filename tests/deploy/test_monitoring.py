"""Rules and dashboard speak of metrics that a run exports, with labels that they have; the rules do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.metric_names import METRICS, STEP_METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "slotwise.json").read_text())
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
NAME = re.compile(r"\b(ray_slotwise_\w+|slotwise:\w+)")
LABELS_OF_RECORDED = {
    "slotwise:current_slot": {"run", "role", "rank", "slot", "state"},
    "slotwise:engine_behind_by": {"run", "engine"},
    "slotwise:engine_serving": {"run", "engine"},
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def expressions() -> list[tuple[str, str]]:
    rules = [(str(r.get("alert", r.get("record"))), str(r["expr"])) for group in GROUPS for r in group["rules"]]
    panels = [(str(p["title"]), str(t["expr"])) for p in DASHBOARD["panels"] for t in p["targets"]]
    variables = [(v["name"], v["query"]["query"]) for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return [*rules, *panels, *variables]


def labels_of(name: str) -> set[str]:
    return LABELS_OF_RECORDED.get(name) or set(METRICS[name.removeprefix("ray_")].labels)


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=[where for where, _ in expressions()])
def test_every_metric_is_exported_and_has_the_labels_asked_for(where: str, expression: str) -> None:
    names = set(NAME.findall(expression))
    assert names, "asks for nothing"
    known = {f"ray_{name}" for name in METRICS} | RECORDED
    assert names <= known
    for name, selector in re.findall(r"(ray_slotwise_\w+|slotwise:\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", selector)) <= labels_of(name)
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert grouped <= set.union(*(labels_of(name) for name in names))


def test_recorded_series_have_the_labels_that_are_claimed() -> None:
    assert set(LABELS_OF_RECORDED) == RECORDED


def test_the_dashboard_shows_every_metric_of_a_step_and_its_panels_do_not_overlap() -> None:
    shown = {name for _, expression in expressions() for name in NAME.findall(expression)}
    assert {f"ray_{name}" for name in STEP_METRICS.values()} <= shown
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip # noqa: E501
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_asks_the_chosen_prometheus_for_the_chosen_run() -> None:
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["expr"].count('run="$run"') == len(NAME.findall(target["expr"]))


def test_no_label_takes_ever_new_values() -> None:
    assert {label for metric in METRICS.values() for label in metric.labels} == {
        "run", "role", "rank", "slot", "state", "trigger", "engine", "outcome",
    }  # fmt: skip


def test_every_alert_is_tested_and_says_what_it_is_about() -> None:
    tests = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
    expected: dict[str, list[Any]] = {}
    for test in tests:
        for rule in test["alert_rule_test"]:
            expected.setdefault(rule["alertname"], []).append(rule["exp_alerts"])
    for name, rule in ALERTS.items():
        assert [] in expected[name], f"{name}: no test that it keeps quiet"
        assert any(expected[name]), f"{name}: no test that it fires"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")


@needs_promtool
@pytest.mark.parametrize("asked", ["check rules rules.yml", "test rules rules_test.yml", "check config prometheus.yml"])
def test_promtool_agrees(asked: str) -> None:
    done = subprocess.run(["promtool", *asked.split()], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
