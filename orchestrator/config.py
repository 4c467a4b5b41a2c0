"""The whole configuration of a run: sections of the driver, composed with those of the storeys below.

Values only. What makes a combination right is decided in `orchestrator/checks/configuration.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from state.config import CheckpointConfig, Frozen, OldActorConfig, RefConfig, TeacherConfig
from workers.config import (
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
    WeightsConfig,
)


class RunConfig(Frozen):
    name: str = "run"
    dir: str | None = None
    """Run directory. Unset: `runs/NAME`."""
    seed: int = Field(default=0, ge=0)


class LoopConfig(Frozen):
    mode: Literal["sync", "async", "fully_async"] = "sync"
    """`sync`: generate, train, publish. `async`: the next rollout is generated while this one is trained on.
    `fully_async`: engines generate continuously, also through a publish; training takes what is finished, the oldest
    first, none of it staler than `max_staleness`."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Of a `fully_async` loop: how many versions of the actor may lie between the oldest token of a sample and the
    version that is trained on it (AReaL's `max_head_offpolicyness`, its paper's eta, arXiv 2505.24298). Unset: 1."""
    num_rollout: int | None = Field(default=None, ge=0)
    """Rollouts of the whole run; a resumed run does what is left of them. 0: only evaluate."""
    num_epoch: int | None = Field(default=None, ge=1)
    """Passes over `data.path`, instead of `num_rollout`: as many rollouts as take every prompt that is not left out so
    often. Epochs follow one another without a gap, so that only the last rollout of all is filled up, with prompts of
    an epoch more."""
    start_rollout_id: int | None = Field(default=None, ge=0)
    """Overrides where a checkpoint says to start."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Publish to the engines after every so many rollouts."""


class DataConfig(Frozen):
    path: str | None = None
    """JSONL file of prompts, Parquet file (`.parquet`), or directory that a Hugging Face Dataset was saved to; the
    latter two need pyarrow. `path@[start:stop:step]` takes the rows that the slice takes of a Python list."""
    generator: str | None = None
    """A registered generator or an import path `package.module:function`, instead of `path`."""
    input_key: str = "prompt"
    label_key: str = "label"
    apply_chat_template: bool = False
    shuffle: bool = True
    """A new order each epoch, from `run.seed`."""
    max_prompt_len: int | None = Field(default=None, ge=1)
    """Prompts of more tokens are left out and counted. Unset: 1024, or what the model's context leaves beside a
    response, where that is less."""


class RewardConfig(Frozen):
    name: str | None = None
    """A registered reward or an import path `package.module:function`."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Limit of one sample; one that exceeds it is counted and left out."""


class EvalConfig(Frozen):
    interval: int | None = Field(default=None, ge=1)
    """Evaluate after every so many rollouts, and before the first of a process. Unset: never."""
    data: DataConfig | None = None
    reward: RewardConfig | None = None
    """Unset: the training reward."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    n_samples_per_prompt: int = Field(default=1, ge=1)
    max_prompts: int = Field(default=64, ge=1)


class ClusterConfig(Frozen):
    address: str | None = None
    """Ray cluster to join. Unset: `RAY_ADDRESS`, else a local one that ends with the run."""
    offload_train: bool = False
    """Free the trainers' live weights and gradients while engines generate or evaluate (`sync` loops). Weights rest in
    host memory meanwhile and come back verified; optimizer state stays where it is."""
    placement_timeout_s: float = Field(default=300.0, gt=0)
    """Limit of waiting for resources."""
    max_gang_restarts: int = Field(default=3, ge=0)
    """Failures of training ranks after which one process of the run builds the gang anew, and continues from its newest
    checkpoint. 0: the first failure ends the run."""
    inspector_host: str = "127.0.0.1"
    """Address that the inspector's page listens on. Whoever opens it needs the token, wherever it listens."""
    inspector_port: int = Field(default=0, ge=0, le=65535)
    """Port of the inspector's page on the driver's node; 0: a free one."""


class WandbConfig(Frozen):
    """Weights & Biases (`pip install "slotwise[wandb]"`). Its credentials are never options: W&B reads them from the
    driver's environment."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """`offline` writes to the run directory, for `wandb sync` later."""
    project: str = "slotwise"
    entity: str | None = None
    """Team. Unset: W&B's default for the account."""


class TrackingConfig(Frozen):
    """Where metrics go beside the terminal and the run directory's JSONL files. A tracker that fails never fails the
    run."""

    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run directory (`pip install "slotwise[tensorboard]"`)."""


class DebugConfig(Frozen):
    """Halves of a run, for finding out which one is at fault."""

    save_rollouts: str | None = None
    """Directory to save every rollout into, with rewards, and which weights generated it."""
    load_rollouts: str | None = None
    """Train on the rollouts saved there instead of generating any: no engine is started and nothing is published."""
    rollout_only: bool = False
    """Publish once, then generate and judge rollouts without training on them."""


class Config(Frozen):
    """One run. YAML sections and `--section.key` flags have these names."""

    run: RunConfig = RunConfig()
    loop: LoopConfig = LoopConfig()
    model: ModelConfig = ModelConfig()
    ref: RefConfig = RefConfig()
    teacher: TeacherConfig = TeacherConfig()
    old_actor: OldActorConfig = OldActorConfig()
    train: TrainConfig = TrainConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()
    debug: DebugConfig = DebugConfig()
