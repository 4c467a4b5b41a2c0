"""What a checkpoint says about data: the trained cursor, and the rollouts still waiting."""

import json
from typing import Any

import pytest

from orchestrator.rollouts.buffer import Rollout, RolloutBuffer
from state.slots import WeightId
from workers.batch import Sample, VersionSpan


def rollout(rollout_id: int, reward: float | None = 0.5) -> Rollout:
    sample = Sample(
        group_id=rollout_id,
        index=0,
        prompt_ids=(1, 2),
        response_ids=(3, 4),
        logprobs=(-0.10000000149011612, -3.4028234663852886e38),
        loss_mask=(0, 1),
        versions=(WeightId(0, rollout_id), WeightId(1, rollout_id)),
        spans=(VersionSpan(WeightId(0, rollout_id), 0, 1), VersionSpan(WeightId(1, rollout_id), 1, 2)),
        seed=2**63 - 1,
        finish_reason="length",
        reward=reward,
    )
    return Rollout(rollout_id, (sample,), cursor(rollout_id + 1), {"reward/mean": 0.5})


def cursor(position: int) -> dict[str, Any]:
    return {"position": position}


def through_disk(buffer: RolloutBuffer) -> RolloutBuffer:
    return RolloutBuffer.from_state(json.loads(json.dumps(buffer.state(), allow_nan=False)))


def test_the_saved_cursor_is_the_trained_one() -> None:
    buffer = RolloutBuffer(cursor(0))
    buffer.add(rollout(0))
    buffer.add(rollout(1))
    assert buffer.state()["cursor"] == cursor(0)
    buffer.mark_trained(0)
    assert buffer.state()["cursor"] == cursor(1)


def test_a_waiting_rollout_is_served_again_after_a_restart_bit_for_bit() -> None:
    buffer = RolloutBuffer(cursor(0))
    for rollout_id in range(2):
        buffer.add(rollout(rollout_id))
    buffer.mark_trained(0)
    restored = through_disk(buffer)
    assert restored.take(1) == rollout(1)
    assert restored.take(2) is None
    restored.mark_trained(1)
    assert restored.state() == {"cursor": cursor(2), "waiting": []}


def test_new_rollouts_begin_after_the_last_one_made() -> None:
    buffer = RolloutBuffer(cursor(0))
    assert buffer.made_cursor == cursor(0)
    for rollout_id in range(3):
        buffer.add(rollout(rollout_id))
    buffer.mark_trained(0)
    assert buffer.made_cursor == cursor(3)
    assert through_disk(buffer).made_cursor == cursor(3)
    for rollout_id in (1, 2):
        buffer.mark_trained(rollout_id)
    assert through_disk(buffer).made_cursor == cursor(3)


def test_a_sample_without_reward_survives_a_restart() -> None:
    buffer = RolloutBuffer(cursor(0))
    buffer.add(rollout(0, reward=None))
    assert through_disk(buffer).take(0) == rollout(0, reward=None)


def test_restored_rollouts_wait_in_the_state_until_they_are_trained() -> None:
    buffer = RolloutBuffer(cursor(5))
    for rollout_id in (5, 6):
        buffer.add(rollout(rollout_id))
    restored = through_disk(buffer)
    taken = restored.take(5)
    assert restored.state() == buffer.state()
    assert restored.take(5) == taken
    restored.mark_trained(5)
    again = through_disk(restored)
    assert again.take(6) == rollout(6)
    assert again.state()["cursor"] == cursor(6)


def test_restored_rollouts_are_served_in_order_under_other_numbers_too() -> None:
    buffer = RolloutBuffer(cursor(5))
    for rollout_id in (5, 6):
        buffer.add(rollout(rollout_id))
    restored = through_disk(buffer)
    first, second = restored.take(20), restored.take(21)
    assert first is not None
    assert second is not None
    assert [first.rollout_id, second.rollout_id] == [20, 21]
    assert [first.samples, second.samples] == [rollout(5).samples, rollout(6).samples]


def test_training_on_what_is_not_waiting_is_refused() -> None:
    buffer = RolloutBuffer(cursor(0))
    buffer.add(rollout(3))
    with pytest.raises(ValueError, match=r"rollout 2 is not waiting .* waiting: 3"):
        buffer.mark_trained(2)
    buffer.mark_trained(3)
    with pytest.raises(ValueError, match="waiting: none"):
        buffer.mark_trained(3)
