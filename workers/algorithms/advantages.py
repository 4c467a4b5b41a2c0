"""From rewards of whole samples to advantages. Pure functions; the caller brings together what belongs together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.algorithms.kl import KlEstimator, kl_per_token

_STD_EPS = 1e-6


def penalised_reward(
    reward: float, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kl_coef: float, estimator: KlEstimator
) -> float:
    """`reward - kl_coef x sum over loss tokens of the KL estimate`: KL(behaviour, ref) as a penalty on the reward.

    `logprobs` are those of the policy that generated the sample, `ref_logprobs` those of the reference, `mask` is 1 on
    tokens that count; all [response_len]. A sample without loss tokens keeps its reward. Apply it before groups are
    normalised. Reference: InstructGPT, arXiv 2203.02155, equation 2, with the estimate summed over tokens.
    """
    if kl_coef == 0.0:
        return reward
    with torch.no_grad():
        return reward - kl_coef * float(kl_per_token(logprobs, ref_logprobs, mask, estimator).double().sum())


def group_relative(rewards: Tensor | Sequence[float], group_ids: Sequence[int], *, normalize_by_std: bool) -> Tensor:
    """Advantage of each sample within its group: reward minus group mean, and divided by the group's standard
    deviation where asked (GRPO, arXiv 2402.03300; without the division: Dr. GRPO, arXiv 2503.20783).

    `rewards` and `group_ids` have one entry per sample, in any order; a group's members must all be there, so callers
    gather them over ranks first. Groups may differ in size. The deviation is that of the sample (n - 1). Groups of one
    member, and groups whose rewards are all equal, get exactly 0. Returns float32 [n].

    Raises:
        ValueError: lengths differ, or a reward is not finite (named by its position).
    """
    values = torch.as_tensor(rewards, dtype=torch.float64).detach().cpu()
    if values.shape != (len(group_ids),):
        raise ValueError(f"{tuple(values.shape)} rewards for {len(group_ids)} group ids; both need one entry a sample")
    if not bool(torch.isfinite(values).all()):
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        raise ValueError(f"rewards at positions {bad} are not finite; leave such samples out before this point")
    members: dict[int, list[int]] = {}
    for position, group in enumerate(group_ids):
        members.setdefault(group, []).append(position)
    advantages = torch.zeros_like(values)
    for positions in members.values():
        group_values = values[positions]
        # Rounding of the mean must not become an advantage of a group that says nothing.
        if len(positions) == 1 or bool((group_values == group_values[0]).all()):
            continue
        # Sorted, so that the result does not depend on the order in which ranks deliver a group's members.
        centred = group_values - group_values.sort().values.mean()
        scale = group_values.sort().values.std() + _STD_EPS if normalize_by_std else 1.0
        advantages[positions] = centred / scale
    return advantages.float()
