"""How one sample comes about: one response to the prompt, or whatever a function of the user's makes of it.

`rollout.generate: package.module:function` names a coroutine function

    async def function(prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer) -> Trajectory

that is called once for each sample. What an engine wrote keeps its ids and log-probs to the end: it is never decoded
and tokenised again. What others wrote (tools, users) is in the sequence without being trained on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.options.imports import import_function
from orchestrator.rollouts.requests import derive_seed
from state.errors import SlotwiseError
from state.slots import WeightId
from workers.batch import FinishReason, Prompt, Trajectory, VersionSpan
from workers.config import SamplingConfig
from workers.rollout.protocol import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WrongTrajectory(SlotwiseError):
    """A generate function returned tokens that no engine wrote as such, that the model does not know, or more than
    there is room for."""


class Ask:
    """Asks an engine for completions of one sample. Each has a seed of its own, from that of the sample."""

    def __init__(
        self,
        request: GenerateRequest,
        sampling: SamplingConfig,
        answer: Callable[[GenerateRequest, SamplingConfig], Awaitable[GenerateResult]],
    ) -> None:
        self._request, self._sampling, self._answer = request, sampling, answer
        self.results: list[GenerateResult] = []

    async def __call__(self, ids: Sequence[int], max_response_len: int | None = None) -> GenerateResult:
        """A completion of exactly these ids, of at most `max_response_len` tokens (unset: as the run samples)."""
        turn = len(self.results)
        request = self._request
        seed = request.seed if turn == 0 else derive_seed(request.seed, turn)
        name = request.request_id if turn == 0 else f"{request.request_id}/{turn}"
        sampling = self._sampling
        if max_response_len is not None:
            sampling = sampling.model_copy(update={"max_response_len": max_response_len})
        result = await self._answer(GenerateRequest(name, tuple(ids), seed), sampling)
        self.results.append(result)
        return result

    @property
    def request_id(self) -> str:
        """`GROUP/INDEX` of the sample."""
        return self._request.request_id

    @property
    def versions(self) -> tuple[WeightId, ...]:
        """Weights that wrote, in order."""
        return tuple(dict.fromkeys(version for result in self.results for version in result.versions))


Generate = Callable[[Prompt, Ask, SamplingConfig, Any], Awaitable[Trajectory]]


async def one_response(
    prompt: Prompt, ask: Ask, sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """The prompt, and one response to it."""
    result = await ask(prompt.ids)
    return Trajectory(result.response_ids, result.logprobs, (1,) * len(result.response_ids), result.finish_reason)


def resolve_generate(path: str | None) -> Generate:
    """The function at an import path; None: `one_response`."""
    return one_response if path is None else import_function(path)


def check_trajectory(
    trajectory: Trajectory, results: Sequence[GenerateResult], max_len: int, vocab_size: int | None, sample: str
) -> None:
    """Raise `WrongTrajectory` unless what is trained on is, token by token, what engines wrote.

    Whole completions may be left out; one that is there has all its tokens, and its log-probs. Tokens that are not
    trained on are the model's to read: they too are below `vocab_size`, as far as that is known.
    """
    ids, logprobs, mask = trajectory.response_ids, trajectory.logprobs, trajectory.loss_mask
    if not len(ids) == len(logprobs) == len(mask):
        raise WrongTrajectory(
            f"sample {sample}: {len(ids)} tokens, {len(logprobs)} log-probs, {len(mask)} mask entries"
        )
    if len(ids) > max_len:
        raise WrongTrajectory(f"sample {sample}: {len(ids)} tokens, but max_response_len is {max_len}")
    for place, one in enumerate(ids):
        if one < 0 or (vocab_size is not None and one >= vocab_size):
            known = "ids are not negative" if vocab_size is None else f"vocab_size is {vocab_size}"
            raise WrongTrajectory(f"sample {sample}: token {place} has id {one}, but the model's {known}")
    if wrong := set(mask) - {0, 1}:
        raise WrongTrajectory(f"sample {sample}: the loss mask has {sorted(wrong)}; only 0 and 1 are entries")
    place = len(_writers(trajectory, results))
    if place < sum(mask):
        raise WrongTrajectory(
            f"sample {sample}: token {place} of those to be trained on is not what an engine wrote there; keep the ids "
            "and log-probs of completions as they are, and mask everything else"
        )


def version_spans(trajectory: Trajectory, results: Sequence[GenerateResult]) -> tuple[VersionSpan, ...]:
    """Which weights wrote which tokens of a trajectory that was checked: those that are trained on, a span for as many
    in a row as the same weights wrote."""
    places = [place for place, trained in enumerate(trajectory.loss_mask) if trained]
    spans: list[VersionSpan] = []
    for place, weights in zip(places, _writers(trajectory, results), strict=True):
        if spans and (spans[-1].weights, spans[-1].end) == (weights, place):
            spans[-1] = replace(spans[-1], end=place + 1)
        else:
            spans.append(VersionSpan(weights, place, place + 1))
    return tuple(spans)


def newest_only(trajectory: Trajectory, spans: Sequence[VersionSpan]) -> Trajectory:
    """Trains on nothing but what the newest of the weights wrote."""
    newest = max((span.weights for span in spans), default=None)
    trained = {place for span in spans if span.weights == newest for place in range(span.start, span.end)}
    mask = tuple(int(place in trained) for place in range(len(trajectory.loss_mask)))
    return replace(trajectory, loss_mask=mask)


def _writers(trajectory: Trajectory, results: Sequence[GenerateResult]) -> list[WeightId]:
    """Of the tokens that are trained on, as far as they are completions in their order, whole ones left out or not."""
    tokens = zip(trajectory.response_ids, trajectory.logprobs, trajectory.loss_mask, strict=True)
    written = [(one, logprob) for one, logprob, trained in tokens if trained]
    writers: list[WeightId] = []
    for result in results:
        whole = list(zip(result.response_ids, result.logprobs, strict=True))
        if written[len(writers) : len(writers) + len(whole)] == whole:
            writers += result.writers
    return writers


class Transcript:
    """Builds a `Trajectory`: completions of engines, and what others say in between."""

    def __init__(self, prompt: Prompt, max_response_len: int) -> None:
        self._prompt, self._max = prompt, max_response_len
        self._made = Trajectory((), (), (), "stop")

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and all that followed: what is to be completed next."""
        return self._prompt.ids + self._made.response_ids

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._max - len(self._made.response_ids)

    def written(self, result: GenerateResult) -> None:
        """An engine's completion of `ids`."""
        self._add(result.response_ids, result.logprobs, 1, result.finish_reason)

    def said(self, ids: Sequence[int]) -> None:
        """Tokens of others. Cut where the room ends; the sample then counts as one that was cut off."""
        fits = tuple(ids[: self.room])
        self._add(fits, (0.0,) * len(fits), 0, "stop" if len(fits) == len(ids) else "length")

    def trajectory(self) -> Trajectory:
        return self._made

    def _add(self, ids: tuple[int, ...], logprobs: tuple[float, ...], trained: int, reason: FinishReason) -> None:
        made = self._made
        self._made = replace(
            made,
            response_ids=made.response_ids + ids,
            logprobs=made.logprobs + logprobs,
            loss_mask=made.loss_mask + (trained,) * len(ids),
            finish_reason=reason,
        )
