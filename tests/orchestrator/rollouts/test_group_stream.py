"""Groups that are generated beside training: none is trained on too late or twice, and none is forgotten."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.resume.data_state import DataState, refuse_groups, waiting_versions
from orchestrator.rollouts.engine_lanes import EngineFailed, NoEngineServes
from orchestrator.rollouts.pipeline import FilterFailed, GenerateFailed, NothingJudged, RolloutTimeout
from state.errors import ResumeError
from state.slots import WeightId
from state.stored import check
from tests.orchestrator.rollouts.streams import BATCH, SAMPLES, World, configuration, go, settle
from workers.batch import Prompt, Sample

HERE = "tests.orchestrator.rollouts.test_group_stream"
ROLLOUTS = 6


def rows(path: Path, count: int) -> dict[str, Any]:
    lines = (json.dumps({"prompt": f"{i // 10} {i % 10} =", "label": "1"}) + "\n" for i in range(count))
    path.write_text("".join(lines))
    return {"data": {"generator": None, "path": str(path)}}


def staleness(world: World) -> dict[int, int]:
    """Of each rollout, the most."""
    return {
        rollout_id: max(rollout_id - weights.version for sample in samples for weights in sample.versions)
        for rollout_id, samples in world.trained.items()
    }


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("interval", [1, 2])
def test_every_prompt_is_trained_on_once_and_none_too_late(tmp_path: Path, max_staleness: int, interval: int) -> None:
    async def body() -> None:
        config = configuration({"loop": {"max_staleness": max_staleness, "update_weights_interval": interval}})
        world = World(tmp_path, config)
        await world.loop(0, ROLLOUTS, interval)
        counted = Counter(sample.group_id for samples in world.trained.values() for sample in samples)
        assert counted == dict.fromkeys(range(ROLLOUTS * BATCH), SAMPLES)
        assert max(staleness(world).values()) <= max_staleness
        assert [world.stats[i]["rollout/staleness_max"] for i in range(ROLLOUTS)] == list(staleness(world).values())

    if max_staleness >= interval - 1:
        go(body)


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("stopped_after", range(ROLLOUTS - 1))
def test_a_run_that_was_stopped_anywhere_loses_no_prompt_and_trains_on_none_twice(
    tmp_path: Path, stopped_after: int, max_staleness: int
) -> None:
    """7 rows in batches of 3: an epoch ends within a rollout. Some groups wait when it is stopped, some are under
    way."""
    config = configuration(rows(tmp_path / "rows.jsonl", 7) | {"loop": {"max_staleness": max_staleness}})

    async def body() -> None:
        first = World(tmp_path, config)
        await first.loop(0, stopped_after)
        await first.train(stopped_after)
        state = first.saved()
        first.desk.close()
        assert check(DataState, state) is None
        assert state["groups"] or state["unfinished"]
        second = World(tmp_path, config, state, stopped_after + 1, incarnation=2)
        await second.loop(stopped_after + 1, ROLLOUTS)
        trained = first.trained | second.trained
        prompts = {(s.group_id, s.index): s.prompt_ids for samples in trained.values() for s in samples}
        assert sum(map(len, trained.values())) == len(prompts) == ROLLOUTS * BATCH * SAMPLES
        whole = World(tmp_path, config, incarnation=3)
        await whole.loop(0, ROLLOUTS)
        assert prompts == {(s.group_id, s.index): s.prompt_ids for part in whole.trained.values() for s in part}
        assert max([*staleness(first).values(), *staleness(second).values()]) <= max_staleness

    go(body)


@pytest.mark.parametrize("version", [0, 1, 50])
def test_a_run_that_continues_begins_as_many_prompts_as_a_fresh_one(tmp_path: Path, version: int) -> None:
    async def body() -> None:
        fresh = configuration({"loop": {"max_staleness": 2, "num_rollout": 100}})
        world = World(tmp_path, fresh, None, version)
        world.engine.held = set(range(1000))
        await world.publish(version)
        assert len(world.saved()["unfinished"]) + len(world.saved()["groups"]) == 3 * BATCH

    go(body)


def test_a_checkpoint_with_a_whole_batch_and_nothing_beyond_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        first = World(tmp_path, configuration())
        await first.publish(0)
        await first.desk.generate(0, WeightId(1, 0))
        await settle()
        state = first.saved()
        first.desk.close()
        assert (len(state["groups"]), state["unfinished"]) == (2 * BATCH, [])
        state = state | {"groups": state["groups"][:BATCH]}
        second = World(tmp_path, configuration(), state, 0, incarnation=2)
        await second.loop(0, 3)
        assert second.groups(0) == [0, 1, 2]
        assert sorted(second.trained) == [0, 1, 2]

    go(body)


def test_nothing_is_begun_that_will_not_be_trained_on(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"loop": {"num_rollout": 2, "max_staleness": 5}}))
        await world.loop(0, 2)
        assert set(world.engine.begun) == set(range(2 * BATCH))
        assert (world.saved()["groups"], world.saved()["unfinished"]) == ([], [])

    go(body)


def test_what_was_begun_too_long_ago_is_begun_again(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration())
        world.engine.held = {0}
        await world.loop(0, 3)
        assert [0 in world.groups(i) for i in range(3)] == [False] * 3
        assert world.stats[2]["rollout/stale_dropped"] == 1
        world.engine.held = set()
        for rollout_id in range(3, ROLLOUTS):
            await world.train(rollout_id)
            await world.publish(rollout_id + 1)
        ((rollout_id, versions),) = [
            (i, {weights.version for s in samples if s.group_id == 0 for weights in s.versions})
            for i, samples in world.trained.items()
            if 0 in world.groups(i)
        ]
        assert min(versions) >= rollout_id - 1

    go(body)


def test_what_is_finished_too_late_is_begun_again(tmp_path: Path) -> None:
    """The response ends by itself while the engine is being paused, so that no publish has cut it off."""

    async def body() -> None:
        world = World(tmp_path, configuration({"loop": {"max_staleness": 2}}))
        world.engine.held = {0}
        for rollout_id in range(2):
            await world.publish(0 if rollout_id == 0 else 1)
            await world.train(rollout_id)
        await world.train(2)
        assert all(0 not in world.groups(i) for i in range(3))
        await world.publish(3, in_between=lambda: world.engine.held.clear())
        finished = [group for group in world.saved()["groups"] if group["at"]["next_group_id"] == 0]
        assert all(version >= 1 for group in finished for s in group["samples"] for _, version in s["versions"])
        await world.train(3)
        assert world.stats[3]["rollout/stale_dropped"] == 1
        assert max(staleness(world).values()) <= 2

    go(body)


def test_what_became_too_stale_between_two_publishes_is_begun_again(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"loop": {"max_staleness": 2, "update_weights_interval": 2}}))
        world.engine.held = {0}
        await world.publish(0)
        await world.train(0)
        await world.train(1)
        await world.publish(2)
        await world.train(2)
        world.engine.held = set()
        await settle()
        assert 0 in [group["at"]["next_group_id"] for group in world.saved()["groups"]]
        await world.train(3)
        assert 0 not in world.groups(3)
        assert world.stats[3]["rollout/stale_dropped"] == 1

    go(body)


def test_the_oldest_are_trained_on_first(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"loop": {"max_staleness": 2}}))
        world.engine.held = {0, 1}
        await world.publish(0)
        await world.train(0)
        assert world.groups(0) == [2, 3, 4]
        world.engine.held = set()
        await settle()
        await world.train(1)
        assert world.groups(1) == [0, 1, 5]

    go(body)


def test_a_response_goes_on_through_publishes_with_the_log_probs_of_those_who_wrote_it(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"loop": {"max_staleness": 3}}))
        await world.loop(0, ROLLOUTS)
        mixed = [s for samples in world.trained.values() for s in samples if len(s.versions) > 1]
        assert mixed
        for sample in mixed:
            wrote = list(dict.fromkeys(token - 2 for token in sample.response_ids))
            assert wrote == [weights.version for weights in sample.versions]

    go(body)


@pytest.mark.parametrize("changes", [{"algorithm": {"old_logprobs": "old_actor"}}, {"rollout": {"stop": ("x",)}}])
def test_where_old_actors_score_them_or_strings_end_them_every_sample_is_of_one_version(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration(changes))
        await world.loop(0, ROLLOUTS)
        samples = [s for part in world.trained.values() for s in part]
        assert {len(s.versions) for s in samples} == {1}
        assert {len(set(s.response_ids)) for s in samples} == {1}

    go(body)


def test_when_it_is_closed_nothing_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration())
        world.engine.held = {0, 3}
        before = len(asyncio.all_tasks())
        await world.publish(0)
        assert len(asyncio.all_tasks()) > before
        world.desk.close()
        await settle()
        assert len(asyncio.all_tasks()) == before

    go(body)


def test_a_rollout_that_does_not_come_says_what_it_waits_for(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"rollout": {"timeout_s": 0.1}}))
        world.engine.held = {1, 2, 3, 4, 5}
        await world.publish(0)
        with pytest.raises(
            RolloutTimeout, match=r"rollout 0 did not .*: 1 of 3 groups are finished, .* 5 under way \(1, 2, 3, 4, 5\)"
        ):
            await world.train(0)
        world.desk.hold()
        with pytest.raises(RolloutTimeout, match="engines wait for a publish to end"):
            await world.desk.generate(0, WeightId(1, 0))

    go(body)


async def lost_over_the_second_rollout(directory: Path) -> World:
    """One rollout is trained, and the engine is lost while a response of the next is under way."""
    world = World(directory, configuration())
    world.engine.held = {4}
    await world.publish(0)
    await world.train(0)
    world.engine.stop_serving()
    return world


def test_without_engines_whoever_waits_is_told_and_a_publish_goes_on_with_the_same_prompts(tmp_path: Path) -> None:
    async def body() -> None:
        world = await lost_over_the_second_rollout(tmp_path)
        with pytest.raises(NoEngineServes):
            await world.desk.generate(1, WeightId(1, 0))
        world.engine.held = set()
        await world.publish(0)
        await world.train(1)
        assert world.groups(0) + world.groups(1) == list(range(2 * BATCH))

    go(body)


def test_engines_that_were_lost_and_published_to_again_before_anyone_waited_are_no_news(tmp_path: Path) -> None:
    async def body() -> None:
        world = await lost_over_the_second_rollout(tmp_path)
        await settle()
        world.engine.held = set()
        await world.publish(1)
        await world.train(1)
        assert world.groups(0) + world.groups(1) == list(range(2 * BATCH))

    go(body)


def test_an_engine_that_fails_and_goes_on_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration())
        world.engine.fails = RuntimeError("out of memory")
        await world.publish(0)
        with pytest.raises(EngineFailed, match="out of memory"):
            await world.train(0)

    go(body)


async def no_trajectory(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rollout": {"generate": f"{HERE}:no_trajectory"}}, GenerateFailed),
        ({"reward": {"name": f"{HERE}:broken"}}, NothingJudged),
    ],
)
def test_a_batch_with_nothing_to_train_on_ends_the_run(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration(changes))
        await world.publish(0)
        with pytest.raises(error, match="ZeroDivisionError"):
            await world.train(0)

    go(body)


def odd_groups(prompt: Prompt, samples: tuple[Sample, ...]) -> bool:
    return prompt.group_id % 2 == 1


def none(prompt: Prompt, samples: tuple[Sample, ...]) -> bool:
    return False


def broken(*_: object) -> bool:
    raise ZeroDivisionError


def test_groups_that_the_filter_refuses_are_made_up_for(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"rollout": {"filter": f"{HERE}:odd_groups"}}))
        await world.loop(0, 2)
        assert all(group % 2 for i in (0, 1) for group in world.groups(i))
        assert sum(world.stats[i]["filter/refused"] for i in (0, 1)) >= 2 * BATCH - 1

    go(body)


def test_a_filter_that_refuses_everything_does_not_end_in_waiting(tmp_path: Path) -> None:
    async def body() -> None:
        rollout = {"filter": f"{HERE}:none", "max_prompts_factor": 2.0}
        world = World(tmp_path, configuration({"rollout": rollout}))
        await world.loop(0, 2)
        assert [world.stats[i]["filter/refused"] for i in (0, 1)] == [BATCH, BATCH]
        assert world.stats[0]["filter/refused_but_used"] >= BATCH

    go(body)


def test_a_filter_that_raises_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration({"rollout": {"filter": f"{HERE}:broken"}}))
        await world.publish(0)
        with pytest.raises(FilterFailed, match="ZeroDivisionError"):
            await world.train(0)

    go(body)


def test_a_group_that_times_out_is_left_out_for_another(tmp_path: Path) -> None:
    async def body() -> None:
        limits = {"group_timeout_s": 0.2, "group_retries": 0}
        world = World(tmp_path, configuration({"rollout": limits, "loop": {"max_staleness": 0}}))
        world.engine.held = {0}
        await world.publish(0)
        await world.train(0)
        assert 0 not in world.groups(0)
        assert len(world.groups(0)) == BATCH
        assert world.stats[0]["rollout/groups_timed_out"] >= 1

    go(body)


def test_rollouts_that_an_async_loop_left_waiting_are_trained_on_first(tmp_path: Path) -> None:
    async def body() -> None:
        earlier = World(tmp_path, configuration({"loop": {"mode": "async"}}))
        await earlier.publish(0)
        await earlier.train(0)
        await earlier.desk.generate(1, WeightId(1, 0))
        state = earlier.saved()
        later = World(tmp_path, configuration(), state, 1, incarnation=2)
        await later.loop(1, ROLLOUTS)
        assert later.groups(1) == [3, 4, 5]
        assert {w.incarnation for s in later.trained[1] for w in s.versions} == {1}
        trained = [g for world in (earlier, later) for i in world.trained for g in world.groups(i)]
        assert sorted(trained) == list(range(ROLLOUTS * BATCH))

    go(body)


def test_another_loop_would_lose_groups_and_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        world = World(tmp_path, configuration())
        world.engine.held = {4}
        await world.publish(0)
        await world.train(0)
        state = world.saved()
        assert waiting_versions(state) == {0}
        refuse_groups(state, "fully_async", tmp_path)
        for mode in ("sync", "async"):
            with pytest.raises(ResumeError, match=f"2 groups wait to be trained on and 1 were under way, .* `{mode}`"):
                refuse_groups(state, mode, tmp_path)
        refuse_groups(state | {"groups": [], "unfinished": []}, "sync", tmp_path)
        world.desk.close()

    go(body)
