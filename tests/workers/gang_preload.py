"""What the fork server of `gang_processes` imports once, so that each rank of each test starts in milliseconds."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

for name in (
    "torch.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.auto.modeling_auto",
):
    importlib.import_module(name)
