"""From prompts to requests and from results to samples: pure, so that the same prompts give the same rollout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from state.errors import SlotwiseError
from workers.batch import Prompt, Sample
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


def assign(groups: Sequence[Sequence[GenerateRequest]], num_engines: int) -> list[list[GenerateRequest]]:
    """Requests of each engine: groups go round robin in the order of their prompts, always the same way."""
    return [[request for group in groups[engine::num_engines] for request in group] for engine in range(num_engines)]


def check_answers(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult], engine_id: str) -> None:
    """Raise `IncompleteRollout` unless there is exactly one result per request, in their order."""
    asked, got = [request.request_id for request in requests], [result.request_id for result in results]
    if asked != got:
        missing, extra = sorted(set(asked) - set(got)), sorted(set(got) - set(asked))
        raise IncompleteRollout(
            f"engine {engine_id} answered {len(got)} of {len(asked)} requests; missing {missing[:5]}, extra {extra[:5]}"
        )


def to_sample(prompt: Prompt, index: int, request: GenerateRequest, result: GenerateResult) -> Sample:
    """Ids and log-probs exactly as the engine gave them; every token of the response is trained on."""
    return Sample(
        group_id=prompt.group_id,
        index=index,
        prompt_ids=prompt.ids,
        response_ids=result.response_ids,
        logprobs=result.logprobs,
        loss_mask=(1,) * len(result.response_ids),
        versions=result.versions,
        seed=request.seed,
        finish_reason=result.finish_reason,
    )
