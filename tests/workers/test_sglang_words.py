"""What an SGLang server is told and what is made of its answers, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from state.slots import WeightId
from tests.workers.stand_in_server import ENGINE, StandInStage, answer
from workers.config import SamplingConfig
from workers.rollout.protocol import EngineRefused, GenerateRequest, GenerateResult, WeightsMismatch
from workers.rollout.sglang import read_continued, read_result
from workers.rollout.sglang_client import ServerRefused
from workers.rollout.sglang_transfer import SglangTransfer
from workers.weights.errors import TransportError

ASKED = GenerateRequest("0/0", (3, 4), 7)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> StandInStage:
    return StandInStage(monkeypatch)


def test_telling_the_version_ends_nothing_that_is_in_flight(stage: StandInStage) -> None:
    """A server that is not told otherwise aborts every request."""
    in_flight = {"0/0", "0/1"}

    def update_version(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("abort_all_requests", True):
            in_flight.clear()
        return {"success": True, "new_version": body["new_version"]}

    stage.server.answers["/update_weight_version"] = update_version
    weights = stage.publish(7)
    assert [body["new_version"] for body in stage.server.bodies("/update_weight_version")] == [str(weights)] == ["1.7"]
    assert in_flight == {"0/0", "0/1"}


@pytest.mark.parametrize("label", [{}, {"weight_version": "default"}, {"weight_version": "1.9"}])
def test_which_weights_wrote_is_what_was_published_whatever_the_servers_label_says(
    stage: StandInStage, label: dict[str, str]
) -> None:
    weights = stage.publish(10)
    stage.server.answers["/generate"] = lambda body: [answer((5, 1), **label)]
    (result,) = stage.engine.generate([ASKED], SamplingConfig(), weights)
    assert result.versions == (WeightId(1, 10),)


def test_an_aborted_response_may_lack_everything() -> None:
    for meta in ({}, {"finish_reason": None}, {"finish_reason": {"type": "abort"}, "output_token_logprobs": None}):
        result = read_result(ASKED, {"meta_info": meta}, WeightId(1, 2))
        assert (result.response_ids, result.logprobs, result.finish_reason) == ((), (), "abort")


def test_versions_are_numbers() -> None:
    assert sorted([WeightId(1, 10), WeightId(1, 9), WeightId(0, 11)]) == [
        WeightId(0, 11),
        WeightId(1, 9),
        WeightId(1, 10),
    ]


def test_each_request_has_its_own_seed_and_the_server_gets_it_whole(stage: StandInStage) -> None:
    weights = stage.publish()
    stage.server.answers["/generate"] = lambda body: [answer((5,)) for _ in body["input_ids"]]
    seeds = [1, 2, (1 << 63) - 1]
    stage.engine.generate([GenerateRequest(f"0/{i}", (3,), s) for i, s in enumerate(seeds)], SamplingConfig(), weights)
    (body,) = stage.server.bodies("/generate")
    assert [one["sampling_seed"] for one in body["sampling_params"]] == seeds


@pytest.mark.parametrize(
    "path", ["/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"]
)
def test_a_step_of_an_update_that_was_no_success_ends_it_with_the_servers_words(stage: StandInStage, path: str) -> None:
    def refuses(body: object) -> None:
        raise ServerRefused(f"{path}: x (status 200)", 200)

    stage.server.answers[path] = refuses
    transfer: Any = SglangTransfer(ENGINE, stage.server, device="cpu", tp_size=1, timeout_s=1.0)  # type: ignore[arg-type]
    stage.engine._transfer = transfer
    with pytest.raises(TransportError, match=rf"{ENGINE}: {path}: x"):
        stage.update(1)
    assert stage.engine.view().weights is None
    with pytest.raises(EngineRefused, match="publish p1 is under way"):
        stage.engine.resume()


# --- responses that wait for the next weights


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_a_response_that_waited_says_which_weights_wrote_which_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = StandInStage(monkeypatch, "retract")
    weights = stage.publish(9)

    def while_it_is_generated(body: Any) -> list[Any]:
        assert stage.engine.view().in_flight == 1
        stage.publish(10)
        return [answer((5, 6, 7), weight_versions=[span("1.9", 0, 2), span("1.10", 2, 3)])]

    stage.server.answers["/generate"] = while_it_is_generated
    (result,) = stage.engine.generate([ASKED], SamplingConfig(), weights)
    assert (result.versions, result.handovers) == ((WeightId(1, 9), WeightId(1, 10)), (2,))
    assert result.writers == (WeightId(1, 9), WeightId(1, 9), WeightId(1, 10))
    assert {body["mode"] for body in stage.server.bodies("/pause_generation")} == {"retract"}


def test_an_update_that_comes_to_nothing_ends_the_responses_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = StandInStage(monkeypatch, "retract")
    stage.publish()
    stage.engine.abort("torn")
    assert stage.server.asked[-1] == ("/pause_generation", {"mode": "abort"})


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        (None, "does not say which weights wrote response 0/0"),
        ([span("default", 0, 1)], "'default' names no weights"),
        ([span("1.8", 0, 1)], "asked of 1.9, is by 1.8"),
        ([span("1.10", 0, 1), span("1.9", 1, 2)], "is by 1.10, 1.9"),
    ],
)
def test_tokens_of_nobody_knows_whom_are_no_response(spans: Any, says: str) -> None:
    meta = {} if spans is None else {"weight_versions": spans}
    with pytest.raises(WeightsMismatch, match=says):
        read_continued(ASKED, answer((5, 6), **meta), WeightId(1, 9))


def test_a_response_that_never_began_is_by_the_weights_it_was_asked_of() -> None:
    result = read_continued(ASKED, answer((), "abort", weight_versions=[span("1.9", 0, 0)]), WeightId(1, 9))
    assert (result.versions, result.handovers) == ((WeightId(1, 9),), ())


@pytest.mark.parametrize("handovers", [(), (3, 2), (1, 5), (1, 2, 3)])
def test_a_response_changes_hands_once_between_two_versions_within_its_tokens(handovers: tuple[int, ...]) -> None:
    versions = (WeightId(1, 1), WeightId(1, 2), WeightId(1, 3))
    with pytest.raises(ValueError, match="response 0/0: 4 tokens by 3 versions cannot have changed hands at"):
        GenerateResult("0/0", (1, 2, 3, 4), (0.0,) * 4, "stop", versions, handovers)
