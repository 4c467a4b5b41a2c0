"""From prompts to requests and from results to samples: pure, so that the same prompts give the same rollout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from state.errors import SlotwiseError
from state.slots import WeightId
from workers.batch import Prompt, Sample, Trajectory, VersionSpan
from workers.rollout.protocol import GenerateRequest, GenerateResult


class IncompleteRollout(SlotwiseError):
    """An engine answered with other responses than it was asked for."""


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) of its own for each sequence of parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def requests_for(prompt: Prompt, n: int, seed_of: Sequence[int | str]) -> list[GenerateRequest]:
    """`n` requests for one prompt; the seed of each is a function of `seed_of`, the group and its index alone."""
    return [
        GenerateRequest(f"{prompt.group_id}/{index}", prompt.ids, derive_seed(*seed_of, prompt.group_id, index))
        for index in range(n)
    ]


def check_answers(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult], engine_id: str) -> None:
    """Raise `IncompleteRollout` unless there is exactly one result per request, in their order."""
    asked, got = [request.request_id for request in requests], [result.request_id for result in results]
    if asked != got:
        missing, extra = sorted(set(asked) - set(got)), sorted(set(got) - set(asked))
        raise IncompleteRollout(
            f"engine {engine_id} answered {len(got)} of {len(asked)} requests; missing {missing[:5]}, extra {extra[:5]}"
        )


def to_sample(
    prompt: Prompt,
    index: int,
    request: GenerateRequest,
    trajectory: Trajectory,
    versions: tuple[WeightId, ...],
    spans: tuple[VersionSpan, ...] = (),
) -> Sample:
    """Ids, log-probs and mask exactly as they came about, by engines that held `versions`."""
    return Sample(
        group_id=prompt.group_id,
        index=index,
        prompt_ids=prompt.ids,
        response_ids=trajectory.response_ids,
        logprobs=trajectory.logprobs,
        loss_mask=trajectory.loss_mask,
        versions=versions,
        spans=spans,
        seed=request.seed,
        finish_reason=trajectory.finish_reason,
    )
