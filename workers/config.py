"""Options of the actors that hold weights. A leaf: imports pydantic alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from state.config import Frozen


class ModelConfig(Frozen):
    """The model that all slots share."""

    hf_checkpoint: str | None = None
    """Hugging Face directory: config, tokenizer and weights."""
    config: dict[str, Any] | None = None
    """A Hugging Face config (with `model_type`) for random weights, instead of `hf_checkpoint`."""
    tokenizer: str | None = None
    """Tokenizer directory. Unset: `hf_checkpoint`."""
    megatron_to_hf_mode: Literal["raw", "bridge"] = "raw"
    """`raw`: starts from native checkpoints (`slotwise convert`). `bridge`: starts from `hf_checkpoint` directly."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of live weights in training and engines."""


class OptimizerConfig(Frozen):
    """Adam and its schedule, of one role."""

    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up; with 0 the first step runs at `lr`."""
    weight_decay: float = Field(default=0.01, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm to clip to; 0 switches clipping off."""


class TrainConfig(OptimizerConfig):
    """The training gang and its optimizer."""

    lr: float = Field(default=1e-6, gt=0)
    num_workers: int = Field(default=1, ge=1)
    """Ranks of the gang; data parallel size is `num_workers / (TP x PP x CP)`."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    context_parallel_size: Literal[1] = 1
    """Context parallelism needs an attention core that packs sequences; only 1 is offered."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step. Give this or `num_steps_per_rollout`."""
    num_steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps per rollout. Unset, with `global_batch_size` unset: 1."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Padded tokens of one micro-batch; a longer sample goes alone."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for one rank."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for one rank; 0 trains on the CPU."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Limit of one call to the gang (a training step, a save, an init)."""
    setup_hook: str | None = None
    """Import path `package.module:function`, called with the worker before it initialises (tests, tracing)."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Passed through to Megatron's TransformerConfig and OptimizerConfig; checked against their fields."""


class AlgorithmConfig(Frozen):
    """What is optimised."""

    advantage_estimator: Literal["grpo", "ppo", "on_policy_distillation"] = "grpo"
    """`grpo`: reward minus the mean of its group (DeepSeekMath, arXiv 2402.03300). `ppo`: generalised advantages per
    token (Schulman et al., arXiv 1506.02438) from the values of a critic, which is a gang of its own (section
    `critic`). `on_policy_distillation`: nothing of the reward, so that the teacher alone teaches; needs `use_opd`."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Of `ppo`: discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Of `ppo`: 1 takes what was really paid, 0 the critic's word for what comes after the next token."""
    normalize_advantages: bool = False
    """Of `ppo`: whiten advantages over all loss tokens of a rollout, on all ranks."""
    normalize_by_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    old_logprobs: Literal["recompute", "engine", "old_actor"] | None = None
    """Log-probs of the behaviour policy in the importance ratio. `recompute`: by the resident actor before its first
    step (right only when the actor is still what generated). `engine`: those that the engine recorded. `old_actor`: by
    a copy of exactly the weights that generated each sample, taken when they were published. Unset: `recompute` in
    `sync` loops; asynchronous loops must choose."""
    use_opd: bool = False
    """On-policy distillation: minimise the reverse KL to the teacher slot, per token, beside whatever else is
    optimised."""
    opd_kl_coef: float = Field(default=1.0, ge=0)
    """Weight of the reverse KL to the teacher."""
    opd_mode: Literal["advantage", "loss"] = "advantage"
    """`advantage`: subtracted from the advantage of each token. `loss`: a term of the loss, as half its square, whose
    expected gradient is that of the reverse KL."""
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(actor, ref) as a loss term."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(actor, ref) as a penalty on the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token (Schulman, 'Approximating KL Divergence', 2020)."""
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    eps_clip_high: float | None = Field(default=None, gt=0)
    """Upper clip (DAPO, arXiv 2503.14476). Unset: `eps_clip`."""
    entropy_coef: float = Field(default=0.0, ge=0)
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all loss tokens of a step; mean over sequences of their token means; sum over a constant."""

    @property
    def needs_critic(self) -> bool:
        return self.advantage_estimator == "ppo"

    @property
    def needs_ref(self) -> bool:
        return (self.use_kl_loss and self.kl_loss_coef > 0) or self.kl_coef > 0


class CriticConfig(OptimizerConfig):
    """The critic of `algorithm.advantage_estimator: ppo`: a gang of as many ranks as the actor's, in the same layout.

    Nothing here is taken from `train`, nor the reverse; what `train` says of layout, micro-batches, resources and
    Megatron's own options holds for both.
    """

    load: str | None = None
    """What the critic begins with: a checkpoint of a critic, or weights of a policy (converted, or a Hugging Face
    directory), which get a fresh value head. Unset: what the actor begins with, with a fresh value head."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Iteration of `critic.load`; never applies to any other slot. Unset: what its tracker names."""
    save: str | None = None
    """Directory for the critic's checkpoints, saved whenever the actor is. Unset: that of the actor's with `-critic`
    at its end."""
    lr: float = Field(default=1e-5, gt=0)
    value_clip: float | None = Field(default=None, gt=0)
    """How far a value may move from that of the rollout before it stops counting, as in the code of PPO's authors.
    Unset: as far as it likes."""


PauseMode = Literal["abort", "retract"]


class SamplingConfig(Frozen):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """Log-probs are always of the policy at this temperature. 0 is greedy, for evaluation only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    max_response_len: int = Field(default=256, ge=1)
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay in it."""


class RolloutConfig(SamplingConfig):
    """The engines and what is sampled from them."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: transformers inside the engine's actor. `sglang`: a server process of each engine's actor."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Passed through to the SGLang server (`tp_size`, `mem_fraction_static`, ...) and checked against its options;
    beside those `python`, the interpreter that has SGLang (unset: this one), and `env`, variables of its process."""
    pause_mode: PauseMode = "abort"
    """What a publish does with responses that are being generated. `abort`: they end where they are. `retract`: they
    wait in the SGLang server, which goes on with them under the new weights, and says which weights wrote what."""
    mask_former_versions: bool = False
    """Of a response that several weights wrote, train only on what the newest of them wrote; the rest is context."""
    num_engines: int = Field(default=1, ge=1)
    rollout_batch_size: int = Field(default=32, ge=1)
    """Prompts per rollout."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    max_batch_size: int = Field(default=256, ge=1)
    """Sequences that one engine generates at once."""
    cpus_per_engine: float = Field(default=1.0, gt=0)
    gpus_per_engine: float = Field(default=0.0, ge=0)
    requests_per_call: int | None = Field(default=None, ge=1)
    """Requests that an engine is asked in one call. Unset: `max_batch_size` of an embedded engine, which answers call
    by call and has the next one when it ends one; `n_samples_per_prompt` of SGLang, which batches what it has."""
    generate: str | None = None
    """Import path `package.module:function` of a coroutine function that makes one sample (turns, tools). Unset: one
    response to the prompt."""
    filter: str | None = None
    """A registered filter of judged groups or an import path `package.module:function`. Groups that it refuses are made
    up for by further prompts."""
    max_prompts_factor: float = Field(default=3.0, ge=1)
    """A rollout asks for at most this many times `rollout_batch_size` prompts; then refused groups fill what is
    left."""
    group_timeout_s: float | None = Field(default=None, gt=0)
    """Limit of generating one group. Unset: only `timeout_s`."""
    group_retries: int = Field(default=1, ge=0)
    """How often a group that timed out, or was cut off by an abort, is asked for again, of the next engine; after that
    it is left out."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Limit of one rollout."""
    health_interval_s: float = Field(default=10.0, gt=0)
    """Time between two looks at the engines; none during a publish, which has limits of its own."""
    health_timeout_s: float = Field(default=30.0, gt=0)
    """An engine that does not say how it is within this time is dead."""
    max_engine_replacements: int = Field(default=3, ge=0)
    """Dead engines that one process of the run replaces. A replacement serves after the next publish."""
    setup_hook: str | None = None
    """Import path `package.module:function`, called with each engine before it is asked anything (tests, tracing)."""


class WeightsConfig(Frozen):
    """How weights travel from trainers to engines."""

    transport: Literal["distributed", "ipc", "disk"] = "distributed"
    """`distributed`: a process group between trainers and engines, nccl on GPUs, gloo on CPUs. `ipc`: shared memory,
    for engines on the leaders' own machine, and their own GPU (CUDA IPC). `disk`: files in `directory`."""
    directory: str | None = None
    """Of the transport `disk`: an absolute path that trainers and engines share. What is written there is removed."""
    bucket_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Tensors are sent in buckets of about this size; a bigger tensor goes alone."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Limit of each phase of a publish."""
