"""Rollouts handed out and accounted for: across restarts nothing is lost, made twice or trained twice."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Config
from orchestrator.rollouts.desk import RolloutDesk, RolloutRefs
from state.errors import ResumeError
from state.slots import WeightId
from workers.batch import Sample, TrainShard
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

TOKENIZER_DIR = str(Path(__file__).parents[3] / "examples" / "quickstart")


class StandInEngines:
    """One engine at any weights, that answers with its seed."""

    def __init__(self) -> None:
        self.requests = 0

    def serving(self, weights: WeightId) -> Sequence[str]:
        return ["engine"]

    async def generate(
        self, engine_id: str, requests: Sequence[GenerateRequest], sampling: SamplingConfig, expected: WeightId
    ) -> Sequence[GenerateResult]:
        await asyncio.sleep(0)
        self.requests += len(requests)
        return [
            GenerateResult(one.request_id, (2 + one.seed % 10, 1), (-0.5, -0.25), "stop", (expected,))
            for one in requests
        ]


def configuration(data: dict[str, Any] | None = None, batch: int = 3) -> Config:
    return Config.model_validate(
        {
            "model": {"tokenizer": TOKENIZER_DIR},
            "data": data or {"generator": "largest_digit"},
            "reward": {"name": "largest_digit"},
            "train": {"num_workers": 2, "num_steps_per_rollout": 2},
            "rollout": {"rollout_batch_size": batch, "n_samples_per_prompt": 2},
        }
    )


def desk(
    directory: Path,
    state: dict[str, Any] | None = None,
    start: int = 0,
    config: Config | None = None,
    engines: StandInEngines | None = None,
) -> RolloutDesk:
    path = directory / "samples.jsonl"
    return RolloutDesk(
        config or configuration(), engines or StandInEngines(), path, start, state, put=lambda part: part
    )


def generate(made: RolloutDesk, rollout_id: int) -> RolloutRefs:
    return asyncio.run(made.generate(rollout_id, WeightId(0, rollout_id)))


def samples_of(refs: RolloutRefs) -> list[Sample]:
    parts: Sequence[TrainShard] = refs.shards
    return sorted((s for part in parts for s in part.samples), key=lambda s: (s.group_id, s.index))


def test_there_is_one_shard_for_each_data_parallel_rank(tmp_path: Path) -> None:
    refs = generate(desk(tmp_path), 0)
    assert len(refs.shards) == 2
    assert [len(shard.steps) for shard in refs.shards] == [2, 2]
    assert len(samples_of(refs)) == 6
    assert refs.stats["rollout/trained_samples"] == 6


def test_a_rollout_asked_for_again_is_the_same(tmp_path: Path) -> None:
    engines = StandInEngines()
    made = desk(tmp_path, engines=engines)
    assert generate(made, 0) is generate(made, 0)
    assert engines.requests == 6


def test_training_on_what_was_not_made_is_refused(tmp_path: Path) -> None:
    made = desk(tmp_path)
    generate(made, 0)
    made.mark_trained(0)
    for rollout_id in (0, 1):
        with pytest.raises(ValueError, match=f"rollout {rollout_id} is not waiting"):
            made.mark_trained(rollout_id)


def write_rows(path: Path, count: int) -> dict[str, Any]:
    lines = (json.dumps({"prompt": f"{i // 10} {i % 10} =", "label": "1"}) + "\n" for i in range(count))
    path.write_text("".join(lines))
    return {"path": str(path)}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("saved_after", range(6))
def test_a_run_that_was_stopped_anywhere_trains_on_what_one_never_stopped_does(
    tmp_path: Path, mode: str, saved_after: int
) -> None:
    """7 rows in batches of 3: epochs do not divide. In `async`, the next rollout is made before the save."""
    config = configuration(write_rows(tmp_path / "rows.jsonl", 7))

    def run(made: RolloutDesk, first: int, until: int) -> list[Sample]:
        trained: list[Sample] = []
        for rollout_id in range(first, until):
            refs = generate(made, rollout_id)
            if mode == "async":
                generate(made, rollout_id + 1)
            made.mark_trained(rollout_id)
            trained += samples_of(refs)
        return trained

    def prompts(samples: list[Sample]) -> list[Any]:
        return [(s.group_id, s.index, s.prompt_ids, s.response_ids, s.seed) for s in samples]

    whole = run(desk(tmp_path, config=config), 0, 7)
    stopped = desk(tmp_path, config=config)
    before = run(stopped, 0, saved_after)
    state = json.loads(json.dumps(stopped.data_state(), allow_nan=False))
    after = run(desk(tmp_path, state, saved_after, config), saved_after, 7)
    assert prompts(before + after) == prompts(whole)


def test_a_waiting_rollout_is_not_made_again_after_a_restart(tmp_path: Path) -> None:
    first = desk(tmp_path)
    waiting = samples_of(generate(first, 0))
    engines = StandInEngines()
    second = desk(tmp_path, first.data_state(), engines=engines)
    assert samples_of(generate(second, 0)) == waiting
    assert engines.requests == 0
    assert samples_of(generate(second, 1))[0].group_id == 3


def test_a_rollout_still_under_way_when_saving_is_made_again_with_the_same_prompts(tmp_path: Path) -> None:
    async def save_while_generating() -> tuple[dict[str, Any], RolloutRefs]:
        made = desk(tmp_path)
        await made.generate(0, WeightId(0, 0))
        following = asyncio.create_task(made.generate(1, WeightId(0, 0)))
        await asyncio.sleep(0)
        made.mark_trained(0)
        state = made.data_state()
        return state, await following

    state, following = asyncio.run(save_while_generating())
    assert state["waiting"] == []
    restored = generate(desk(tmp_path, state, start=1), 1)
    assert [s.prompt_ids for s in samples_of(restored)] == [s.prompt_ids for s in samples_of(following)]
    assert [s.group_id for s in samples_of(restored)] == [s.group_id for s in samples_of(following)]


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    state = desk(tmp_path).data_state()
    with pytest.raises(ResumeError, match="other data"):
        desk(tmp_path, state, config=configuration(write_rows(tmp_path / "rows.jsonl", 7)))


def test_samples_are_shown_once_for_each_step_also_after_a_restart(tmp_path: Path) -> None:
    first = desk(tmp_path)
    for rollout_id in range(3):
        generate(first, rollout_id)
    for rollout_id in range(2):
        first.mark_trained(rollout_id)
    second = desk(tmp_path, first.data_state(), start=2)
    generate(second, 2)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({line["group_id"] for line in lines}) == 9
