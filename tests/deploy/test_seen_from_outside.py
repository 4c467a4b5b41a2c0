"""A run in a cluster, seen by who did not start it: through Ray, in Ray's dashboard, in Prometheus, on the page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from ray.util.state import list_actors, list_tasks

from tests.deploy.test_monitoring import RULES
from tests.e2e.runs import REPO, Place, until

NAME = "seen"


@dataclass(frozen=True)
class Going:
    """A run that goes on, and the cluster that it goes on in."""

    place: Place
    dashboard: str

    @property
    def run_dir(self) -> Path:
        return self.place.path / NAME


pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    with cluster() as (address, dashboard):
        place = Place(tmp_path_factory.mktemp("seen"), address)
        process = place.start("train", place.config(NAME, {"loop": {"num_rollout": 100_000}}))
        try:
            metrics = place.path / NAME / "metrics.jsonl"
            until(lambda: process.poll() is not None or _has_lines(metrics), "a first rollout")
            assert process.poll() is None, process.stdout and process.stdout.read()
            yield Going(place, dashboard)
        finally:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


@contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """A local one whose metrics are as fresh as a second."""
    fresh = {"RAY_metrics_report_interval_ms": "1000", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
        env=os.environ | fresh | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        yield told["address"], f"http://{told['dashboard']}"
    finally:
        process.stdin.close()
        process.wait(30)


def _has_lines(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def get(url: str, **headers: str) -> Any:
    with build_opener(ProxyHandler({})).open(Request(url, headers=headers), timeout=10) as answer:
        return json.load(answer)


def test_slots_are_asked_through_ray(going: Going) -> None:
    ended = going.place.run("slots", "--address", str(going.place.address), "--json")
    assert ended.code == 0, ended.output
    view = json.loads(ended.output.splitlines()[-1])
    assert (view["run"], view["source"]) == (NAME, "live")
    assert [row["worker"] for row in view["workers"]] == [f"{NAME}/actor/0", f"{NAME}/actor/1"]
    assert {"slot", "version", "digest", "tier", "since", "last_transition"} <= set(view["workers"][0])
    (engine,) = view["engines"]
    assert (engine["engine"], "behind_by" in engine) == (f"{NAME}/engine/0", True)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(going: Going) -> None:
    ended = going.place.run("slots", "--address", str(going.place.address), "--run", "other")
    assert ended.code == 2
    assert f"going on: {NAME}" in ended.output


def test_ray_knows_every_actor_by_run_role_and_rank(going: Going) -> None:
    actors = {a.name: a.repr_name for a in list_actors(address=going.dashboard, detail=True) if a.state == "ALIVE"}
    assert {
        f"{NAME}/actor/0": f"MegatronWorker({NAME}/actor/0)",
        f"{NAME}/actor/1": f"MegatronWorker({NAME}/actor/1)",
        f"{NAME}/engine/0": f"Engine({NAME}/engine/0)",
        f"{NAME}/manager": f"RolloutManager({NAME})",
        f"{NAME}/inspector": f"Inspector({NAME})",
    }.items() <= actors.items()


def test_rays_tasks_show_what_was_borrowed_and_published(going: Going) -> None:
    names = {task.name for task in list_tasks(address=going.dashboard, limit=10_000)}
    assert "train[actor, borrows ref]" in names
    assert "publish[actor@1.0 publish-1-1]" in names


def test_rays_job_says_which_run_with_which_configuration(going: Going) -> None:
    metadata = [job["metadata"] for job in get(f"{going.dashboard}/api/jobs/")]
    (known,) = [found for found in metadata if found and found.get("run") == NAME]
    assert len(known["config_hash"]) == 16


def test_the_log_of_an_actor_tells_its_states(going: Going) -> None:
    (rank,) = [a for a in list_actors(address=going.dashboard, detail=True) if a.name == f"{NAME}/actor/0"]
    url = f"{going.dashboard}/api/v0/logs/file?actor_id={rank.actor_id}&suffix=err&lines=-1"
    with build_opener(ProxyHandler({})).open(url, timeout=10) as answer:
        log = answer.read().decode()
    assert "actor/0 #7 ready: resident.actor -> resident.actor, actor@0" in log
    assert "publishing" in log


def test_the_page_answers_whoever_has_the_token(going: Going) -> None:
    address = json.loads((going.run_dir / "inspector.json").read_text())
    summary = get(address["url"].replace("/api/slots", "/api/summary"), Authorization=f"Bearer {address['token']}")
    assert (summary["run"], summary["status"], summary["ranks"]) == (NAME, "running", 2)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs a Prometheus: apt-get install prometheus")
def test_prometheus_scrapes_it_and_knows_the_slot_of_every_rank(going: Going, tmp_path: Path) -> None:
    (tmp_path / "targets.json").write_text(json.dumps(get(f"{going.dashboard}/api/prometheus/sd")))
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{RULES}]\n"
        "scrape_configs: [{job_name: ray, file_sd_configs: [{files: [targets.json]}]}]\n"
    )
    with prometheus(tmp_path) as query:
        slots = until(lambda: len(found := query("slotwise:current_slot")) == 2 and found, "both ranks' slots", 60)
        assert {(m["run"], m["role"], m["rank"]) for m, _ in slots} == {(NAME, "actor", "0"), (NAME, "actor", "1")}
        for name in ("published_version", "publishes_total", "last_step_timestamp_seconds", "reward_mean", "kl_loss"):
            until(lambda name=name: query(f'ray_slotwise_{name}{{run="{NAME}"}}'), f"{name} of the driver", 60)
        ((labels, value),) = query("slotwise:engine_serving")
        assert (labels["engine"], value in (0.0, 1.0)) == ("0", True)
        assert query('ALERTS{alertstate="firing"}') == []


@contextmanager
def prometheus(directory: Path) -> Iterator[Any]:
    """One that has read `prometheus.yml` in `directory`; yields what asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{port}"],
            cwd=directory, stdout=log, stderr=log,
        )  # fmt: skip

    def query(expression: str) -> list[tuple[dict[str, str], float]]:
        try:
            told = get(f"http://127.0.0.1:{port}/api/v1/query?query={quote(expression)}")
        except URLError:
            return []
        return [(one["metric"], float(one["value"][1])) for one in told["data"]["result"]]

    try:
        yield query
    finally:
        process.terminate()
        process.wait(20)
