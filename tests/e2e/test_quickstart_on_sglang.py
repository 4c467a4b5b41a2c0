"""The main job with the engine of real users: nothing changes but the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import REPO, Place, alive, descendants, lines, until, without_rays_agents
from tests.workers.engine_stage import needs_who_wrote, sglang_python
from workers.rollout.scratch import PREFIX

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


def on_sglang() -> tuple[str, ...]:
    return ("--rollout.engine", "sglang", "--rollout.sglang.python", sglang_python())


def test_it_learns_as_with_embedded_engines(place: Place) -> None:
    run_dir = place.path / "quickstart"
    flags = (*on_sglang(), "--run.dir", run_dir)
    ended = place.run("train", REPO / "examples" / "quickstart.yaml", *flags, timeout_s=1000)
    assert ended.code == 0, ended.output
    steps = lines(run_dir / "metrics.jsonl")
    assert max(entry["rollout/train_engine_logprob_diff"] for entry in steps) < 1e-4
    assert steps[0]["reward/mean"] < 0.2
    assert steps[-1]["reward/mean"] >= 0.9
    assert place.run("audit", run_dir).code == 0


def test_a_driver_that_is_killed_leaves_no_server(place: Place) -> None:
    metrics = place.path / "killed" / "metrics.jsonl"
    process = place.start("train", place.config("killed", {}), *on_sglang(), "--loop.num_rollout", "50")
    try:
        until(lambda: metrics.exists() and lines(metrics), "a first rollout", timeout_s=300)
        family = without_rays_agents(descendants(process.pid))
        servers = [p for p in family if "server_keeper" in " ".join(p.cmdline())]
        scratch = [Path(word) for keeper in servers for word in keeper.cmdline() if PREFIX in word and "/" in word]
    finally:
        process.kill()
        process.wait()
    assert servers
    until(lambda: not alive(family), "every process that the run had started is gone", timeout_s=60)
    until(lambda: not any(path.exists() for path in scratch), "the files of its servers are gone", timeout_s=60)


def test_responses_wait_in_the_server_for_the_next_weights_and_are_trained_on(place: Place) -> None:
    needs_who_wrote()
    changes = {
        "loop": {"mode": "fully_async", "num_rollout": 10, "max_staleness": 2},
        "algorithm": {"old_logprobs": "engine"},
        "model": {"config": {"vocab_size": 256, "max_position_embeddings": 1024}},  # end tokens are rare
        "train": {"num_workers": 1},
        # A response takes longer than a step, so that publishes find some under way.
        "rollout": {"max_response_len": 900, "rollout_batch_size": 2, "pause_mode": "retract"},
        "debug": {"save_rollouts": str(place.path / "rollouts")},
    }
    ended = place.run("train", place.config("waiting", changes), *on_sglang(), timeout_s=400)
    assert ended.code == 0, ended.output
    files = sorted((place.path / "rollouts").glob("rollout_*.json"))
    samples = [sample for file in files for sample in json.loads(file.read_text())["samples"]]
    assert len(samples) == 80
    assert any(len(sample["spans"]) > 1 for sample in samples)
    for sample in samples:
        assert sample["finish_reason"] != "abort"
        assert sum(end - start for *_, start, end in sample["spans"]) == len(sample["response_ids"])
    assert place.run("audit", place.path / "waiting").code == 0
