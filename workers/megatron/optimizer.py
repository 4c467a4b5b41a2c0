"""The optimizer of the primary slot: Megatron's, with its learning-rate schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)

from state.store import give_back
from workers.config import TrainConfig
from workers.megatron import adam
from workers.megatron.masters import mismatches


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """`grad_norm`: before clipping, over all ranks; not finite where the step was skipped for that. `lr`: used here."""

    grad_norm: float
    lr: float
    skipped: bool


class TrainOptimizer:
    """Megatron's optimizer and schedule for one model. Every rank of the gang calls its methods together."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: ChainedOptimizer,
        scheduler: OptimizerParamScheduler,
        clip_grad: float,
    ) -> None:
        self.megatron = optimizer
        self._model = model
        self._scheduler = scheduler
        self._clip_grad = clip_grad
        self._hyper_parameters = [_hyper_parameters(group) for group in optimizer.param_groups]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.megatron.param_groups[0]["lr"])

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken; what the schedule counts. Skipped steps do not count."""
        return int(self._scheduler.num_steps)

    @property
    def masters(self) -> str:
        """Which of Megatron's optimizers keeps the masters; saved state loads into the same kind only."""
        return ", ".join(type(part).__name__ for part in self.megatron.chained_optimizers)

    def zero_grad(self) -> None:
        self._model.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, before_write: Callable[[], None]) -> StepOutcome:
        """Take one step with the gradients that the backward pass has reduced.

        `before_write` is called on every rank immediately before the first byte of parameters or optimizer state may
        change, and not at all where a gradient is not finite: then the step is skipped on all ranks, which see the
        same norm. The schedule advances by one step that was taken.
        """
        self.megatron.prepare_grads()
        lr, norm = self.lr, float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return StepOutcome(norm, lr, skipped=True)
        if self._clip_grad > 0:
            for part in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._clip_grad, norm)
        before_write()
        self.megatron.step_with_ready_grads()
        self._scheduler.step(1)
        return StepOutcome(norm, lr, skipped=False)

    def gradient_norm(self) -> float:
        """Of the gradients that the backward pass has reduced, over all ranks."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    @property
    def steps_of_adam(self) -> int:
        """Steps that went into the moments. Loaded with them, whatever the schedule says."""
        return int(self.megatron.param_groups[0].get("step", 0))

    def moment_norms(self) -> tuple[float, float]:
        """Norms of the first and second moments over all ranks, each parameter counted once. Gradients are dropped."""
        return self._norm_of("exp_avg"), self._norm_of("exp_avg_sq")

    def _norm_of(self, moment: str) -> float:
        """In the place of gradients, since Megatron's norm knows which parts of them are replicas."""
        for part in self.megatron.chained_optimizers:
            for parameter in part.get_parameters():
                parameter.grad = part.optimizer.state[parameter][moment]
        norm = float(self.megatron.get_grad_norm())
        for part in self.megatron.chained_optimizers:
            for parameter in part.get_parameters():
                parameter.grad = None
        return norm

    def finish_gather(self) -> None:
        """Complete what `overlap_param_gather` left for the next forward pass: afterwards live bytes are final."""
        if self._model.use_forward_hook:
            self._model.start_param_sync(force_sync=True)

    @contextmanager
    def gather_off(self) -> Iterator[None]:
        """Inside, no forward pass gathers parameters, so that another slot may stand in their place."""
        if not self._model.use_forward_hook:
            yield
            return
        self._model.disable_forward_pre_hook()
        try:
            yield
        finally:
            self._model.enable_forward_pre_hook()

    def release_gradients(self) -> None:
        """Free the gradient buffers, until `reclaim_gradients`; between two steps nothing in them counts."""
        for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers):
            buffer.offload_to_cpu(move_params=False)
        give_back()

    def reclaim_gradients(self) -> None:
        """Allocate what was freed; nothing else may have been computed in between."""
        for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers):
            buffer.reload_from_cpu(move_params=False)

    def master_mismatches(self) -> list[str]:
        """Local parameters whose master weights, cast to the model's dtype, are not the live bytes (I1)."""
        return mismatches(self._model, self.megatron)

    def reload_masters(self) -> None:
        """Masters := live weights. After weights alone were loaded; moments and step count stay as they are."""
        self.megatron.reload_model_params()

    def restore_schedule(self, num_steps: int) -> None:
        """Continue after `num_steps` optimizer steps, with the hyper-parameters of *this* run.

        The schedule is set, never advanced from where it stands, so that restoring twice changes nothing; whatever
        learning rate, betas or weight decay came with loaded optimizer state are replaced.
        """
        for group, values in zip(self.megatron.param_groups, self._hyper_parameters, strict=True):
            group.update(values)
        self._scheduler.num_steps = 0
        self._scheduler.step(num_steps)


def build_optimizer(
    model: GPTModel, train: TrainConfig, total_steps: int
) -> tuple[DistributedDataParallel, TrainOptimizer]:
    """Wrap this rank's stage for data parallelism and make its optimizer. All ranks of the gang call it together.

    `total_steps`: optimizer steps of the whole run, over which the learning rate decays. Of `train.megatron` the keys
    that are fields of OptimizerConfig apply; those that `train` has options for cannot be given there. Called inside
    `cpu.redirect`. The wrapped model shares its parameters with `model`.
    """
    adam.install()
    _mark_shards(model)
    config = optimizer_config(train, model.config.params_dtype)
    # The loss is a sum over this rank's share of the step: gradients are added up, not averaged.
    model.config.calculate_per_token_loss = True
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=train.use_distributed_optimizer,
            overlap_grad_reduce=config.overlap_param_gather,
            overlap_param_gather=config.overlap_param_gather,
        ),
        module=model,
    )
    model.config.finalize_model_grads_func = _finalize_grads
    model.config.no_sync_func = ddp.no_sync if config.overlap_param_gather else None
    optimizer = get_megatron_optimizer(config, [ddp])
    for part in optimizer.chained_optimizers:
        # Now rather than at the first step, so that a checkpoint from before it is like any other.
        part.init_state_fn(part.optimizer, config)
    return ddp, TrainOptimizer(ddp, optimizer, _schedule(optimizer, train, total_steps), train.clip_grad)


def _mark_shards(model: GPTModel) -> None:
    """Megatron marks parameters that are split over TP ranks while it initialises them, which ours are not. Without the
    mark their gradients count as replicas, and the gradient norm misses all of them but those of the first rank."""
    for module in model.modules():
        # A tied output layer has no weight of its own.
        if isinstance(module, VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear) and (
            module.weight is not None and not module.weight.__dict__.get("tensor_model_parallel")
        ):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def optimizer_config(train: TrainConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's config for `train`. Raises ValueError for keys of `train.megatron` that are not free."""
    decided: dict[str, Any] = {
        "optimizer": "adam",
        "lr": train.lr,
        "min_lr": train.min_lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_eps": train.adam_eps,
        "clip_grad": train.clip_grad,
        "use_distributed_optimizer": train.use_distributed_optimizer,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    chosen = {key: value for key, value in train.megatron.items() if key in fields}
    if clashes := sorted(chosen.keys() & decided.keys()):
        raise ValueError(f"train.megatron.{clashes[0]} is decided by the options of train and model; remove it")
    if chosen.get("use_precision_aware_optimizer") or chosen.get("optimizer_cpu_offload"):
        raise ValueError(
            "train.megatron: use_precision_aware_optimizer and optimizer_cpu_offload keep masters inside an optimizer "
            "of their own, where they cannot be compared with the live weights; remove them"
        )
    if chosen.get("overlap_param_gather") and not train.use_distributed_optimizer:
        raise ValueError("train.megatron.overlap_param_gather needs train.use_distributed_optimizer")
    return OptimizerConfig(**decided, **chosen)


def _schedule(optimizer: ChainedOptimizer, train: TrainConfig, total_steps: int) -> OptimizerParamScheduler:
    warmup = train.lr_warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        # Step n of a warm-up of w runs at lr (n + 1) / (w + 1), so that the first step is not lost.
        init_lr=train.lr / (warmup + 1),
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
    )


def _finalize_grads(
    model: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Reduce gradients over the gang. `num_tokens` is dropped: the loss was divided by totals of the step already."""
    finalize_model_grads(model, None, **options)


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "step")}
