"""How one batch of `transformers.generate()` draws, records and ends its samples.

Drawing is the Gumbel-max trick: argmax(log p + Gumbel noise) has distribution p. The noise is a pure function of
(seed of the sample, position in the response, token id), so that a sample depends on its own seed and prompt and on
nothing that it is batched with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from state.digest_records import MASK64
from workers.batch import FinishReason
from workers.config import SamplingConfig
from workers.rollout.noise import gumbel_noise

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")
_RUNNING, _STOP, _LENGTH, _ABORT = range(4)
_FULL_TOKENS = 8


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Seeds as int64, mod 2^64."""
    wrapped = [seed & MASK64 for seed in seeds]
    return torch.tensor([s - (1 << 64) if s >> 63 else s for s in wrapped], dtype=torch.int64, device=device)


class _Record(LogitsProcessor):
    """Keeps the log-softmax of the scores as they are here: after the temperature, before any cut."""

    def __init__(self) -> None:
        self.logprobs = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logprobs = scores.float().log_softmax(dim=-1)
        return scores


class _SeededNoise(LogitsProcessor):
    """Turns the argmax that follows into a draw."""

    def __init__(self, seeds: Tensor) -> None:
        self._seeds = seeds
        self._position = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = gumbel_noise(self._seeds, self._position, scores.shape[-1])
        self._position += 1
        return scores.double() + noise


class _Ending(StoppingCriteria):
    """Sees every token that was chosen: records its log-prob, and decides which samples end with it."""

    def __init__(
        self,
        record: _Record,
        prompt_len: int,
        sampling: SamplingConfig,
        rooms: Tensor,
        stop_ids: Tensor,
        decode: Callable[[Sequence[int]], str] | None,
        aborted: Callable[[], bool],
    ) -> None:
        self._record, self._prompt_len, self._sampling, self._rooms = record, prompt_len, sampling, rooms
        self._stop_ids, self._decode, self._aborted = stop_ids, decode, aborted
        self._logprobs: list[Tensor] = []
        self._reason = torch.full_like(rooms, _RUNNING)
        self._length = torch.zeros_like(self._reason)
        self._window = max((len(s.encode()) for s in sampling.stop), default=0) + _FULL_TOKENS

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        chosen = input_ids[:, -1]
        self._logprobs.append(self._record.logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
        length = input_ids.shape[1] - self._prompt_len
        stopped = torch.isin(chosen, self._stop_ids)
        if self._sampling.stop:
            stopped |= self._ends_with_string(input_ids[:, self._prompt_len :])
        otherwise = torch.where(length >= self._rooms, _LENGTH, _ABORT if self._aborted() else _RUNNING)
        why = torch.where(stopped, _STOP, otherwise)
        ends_now = (self._reason == _RUNNING) & (why != _RUNNING)
        self._reason = torch.where(ends_now, why, self._reason)
        self._length = torch.where(ends_now, length, self._length)
        return self._reason != _RUNNING

    def _ends_with_string(self, responses: Tensor) -> Tensor:
        """Every token is at least a byte, so that a string that ends with the newest token is within the window."""
        assert self._decode is not None
        running = (self._reason == _RUNNING).tolist()
        found = [
            is_running and any(s in self._decode(ids) for s in self._sampling.stop)
            for is_running, ids in zip(running, responses[:, -self._window :].tolist(), strict=True)
        ]
        return torch.tensor(found, device=responses.device)

    def outcomes(self, output_ids: Tensor) -> list[Outcome]:
        """Of `generate`'s output [num_samples, prompt_len + steps]."""
        logprobs = torch.stack(self._logprobs, dim=1).tolist()
        results = []
        responses = output_ids[:, self._prompt_len :].tolist()
        for row, (length, code) in enumerate(zip(self._length.tolist(), self._reason.tolist(), strict=True)):
            reason = _REASONS[code]
            assert reason is not None, "generation returned before every sample had ended"
            results.append(Outcome(tuple(responses[row][:length]), tuple(logprobs[row][:length]), reason))
        return results


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample: its tokens with the one that ended it, and the float32 log-prob of each."""

    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """What to give to `generate()` for one batch, and where to read the samples from afterwards."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    ending: _Ending

    @staticmethod
    def of(
        sampling: SamplingConfig,
        seeds: Tensor,
        rooms: Tensor,
        prompt_len: int,
        *,
        stop_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None,
        aborted: Callable[[], bool],
    ) -> BatchSampling:
        """`seeds`, `rooms` (tokens that each response may have): int64 [num_samples] on the model's device. `aborted`
        is asked after every token."""
        record = _Record()
        processors: list[LogitsProcessor] = []
        if sampling.temperature not in (0.0, 1.0):
            processors.append(TemperatureLogitsWarper(sampling.temperature))
        processors.append(record)
        if sampling.temperature > 0:
            if sampling.top_k > 0:
                processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                processors.append(TopPLogitsWarper(sampling.top_p))
            processors.append(_SeededNoise(seeds))
        stops = torch.tensor(sorted({*stop_ids, *sampling.stop_token_ids}), dtype=torch.int64, device=seeds.device)
        ending = _Ending(record, prompt_len, sampling, rooms, stops, decode, aborted)
        return BatchSampling(LogitsProcessorList(processors), StoppingCriteriaList([ending]), ending)
