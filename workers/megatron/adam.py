"""Adam as Megatron's distributed optimizer expects it: with the state layout of the fused kernels.

Megatron saves and resumes `exp_avg` and `exp_avg_sq` per parameter and one `step` per parameter group, which is how the
fused Adams of Apex and Transformer Engine keep them. torch's own Adam keeps a `step` per parameter, and resuming the
distributed optimizer with it is broken: it fails, or one shared `step` is advanced once per parameter and the bias
correction is silently wrong. So this one is used on CPUs and GPUs alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import torch
from torch import Tensor


class FusedLayoutAdam(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101), or Adam with L2 where `adam_w_mode` is off (arXiv 1412.6980).

    A subclass of torch's only because Megatron asks for that; it shares no behaviour with it. State per parameter:
    `exp_avg`, `exp_avg_sq`, in the dtype of the parameter. State per group: `step`, an int, absent before the
    first step.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("FusedLayoutAdam counts its steps on the host, which a CUDA graph cannot capture")
        torch.optim.Optimizer.__init__(
            self, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        )
        self._decoupled = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's Adam would look for a step per parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise TypeError("FusedLayoutAdam takes gradients as they are; it evaluates no closure")
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None and p.numel()]
            if pairs:
                self._update(group, [p for p, _ in pairs], [grad for _, grad in pairs])

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        if decay and self._decoupled:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1.0 - beta2**step))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, first, denominators, -lr / (1.0 - beta1**step))


def install() -> None:
    """Tell Megatron, in this process, that its Adam is ours and that it has the fused layout.

    These are the names under which Megatron looks for Apex's or Transformer Engine's Adam when it is imported.
    """
    building, sharding = megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
    building.Adam = FusedLayoutAdam
    building.USING_PYTORCH_OPTIMIZER = False
    sharding.Adam = FusedLayoutAdam
    sharding.HAVE_APEX_OR_TE = True
    sharding.USING_APEX_OPTIMIZER = True
