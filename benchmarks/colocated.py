"""Trainer and engine on one GPU, weights handed over in place: how long each part of a step takes. Prints one JSON.

    python benchmarks/colocated.py --engine sglang --transport disk --sglang-python python3 --sglang-path DIR
    python benchmarks/colocated.py --engine embedded --transport ipc

A random model of the shape of Qwen3-0.6B, bfloat16, every invariant on. The run is a real one, started with the
command line; its audit must come out clean, or there is no result. Figures are means over the rollouts after the first,
which compiles and allocates.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

REPO = Path(__file__).parents[1]
QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SHOWN = {
    "step_s": "perf/step_s",
    "generate_s": "perf/generate_s",
    "train_s": "perf/train_s",
    "borrow_s": "perf/borrow_s",
    "publish_s": "perf/publish_s",
    "verify_s": "perf/verify_s",
    "wake_s": "perf/wake_s",
    "train_engine_logprob_diff": "rollout/train_engine_logprob_diff",
}


def config(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    rollout: dict[str, Any] = {
        "engine": options.engine,
        "num_engines": 1,
        "rollout_batch_size": options.prompts,
        "n_samples_per_prompt": 8,
        "max_response_len": options.response_len,
        "max_batch_size": 256,
        "requests_per_call": options.requests_per_call,
        "gpus_per_engine": 0.5,
    }
    if options.engine == "sglang":
        rollout["sglang"] = {
            "python": options.sglang_python,
            "env": {
                "PYTHONPATH": options.sglang_path,
                "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
                "CUDA_HOME": "/usr/local/cuda",
            },
            "attention_backend": "triton",
            "mem_fraction_static": 0.3,
        }
    return {
        "run": {"name": "colocated", "dir": str(run_dir)},
        "loop": {"num_rollout": options.steps},
        "model": {"tokenizer": str(REPO / "examples" / "quickstart"), "config": QWEN3_06B, "dtype": "bfloat16"},
        "ref": {"tier": options.ref_tier},
        "train": {"num_workers": 1, "lr": 1e-6, "max_tokens_per_micro_batch": 4096, "gpus_per_worker": 0.5},
        "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.001},
        "rollout": rollout,
        "data": {"generator": "largest_digit"},
        "reward": {"name": "largest_digit"},
        "weights": {"transport": options.transport}
        | ({"directory": str(run_dir.parent / "weights")} if options.transport == "disk" else {}),
        "cluster": {"offload_train": options.offload},
    }


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    run_dir, file = scratch / "run", scratch / "colocated.yaml"
    file.write_text(yaml.safe_dump(config(options, run_dir)))
    command = [sys.executable, "-m", "orchestrator"]
    subprocess.run([*command, "train", str(file)], cwd=REPO, check=True, stdout=sys.stderr)
    subprocess.run([*command, "audit", str(run_dir)], cwd=REPO, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    means = {
        name: statistics.fmean(line[key] for line in lines if key in line)
        for name, key in SHOWN.items()
        if any(key in line for line in lines)
    }
    nbytes = lines[-1]["weights/bytes"]
    tokens = statistics.fmean(line["rollout/samples"] * line["rollout/response_len_mean"] for line in lines)
    return {
        **means,
        "published_bytes": nbytes,
        "publish_gb_per_s": nbytes / 1e9 / means["publish_s"],
        "generated_tokens_per_s": tokens / means["generate_s"],
        "trained_tokens_per_s": statistics.fmean(line["train/tokens"] for line in lines) / means["train_s"],
        "rollouts": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--transport", choices=["ipc", "disk"], default="ipc")
    parser.add_argument("--ref-tier", choices=["copy", "device"], default="device")
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=128)
    parser.add_argument("--requests-per-call", type=int, default=None, help="samples of how many requests share a call")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--sglang-path", default="", help="folder with SGLang's packages, put on its PYTHONPATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(options, Path(scratch))
    about = {
        "benchmark": "colocated",
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "command": "python benchmarks/colocated.py " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(about | measured, indent=2))


if __name__ == "__main__":
    main()
