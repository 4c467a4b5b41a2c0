"""How fast weights are hashed beside how fast the same machine copies them, in one run.

python benchmarks/digest.py [--device cuda] [--megabytes 4096] [--out benchmarks/results/digest.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from state.digest import digest_tensor

ROW = 4096


def best(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = options.megabytes * (1 << 20) // (2 * ROW)
    weights = torch.randn(rows, ROW, device=options.device).to(torch.bfloat16)
    target = torch.empty_like(weights)
    nbytes = weights.numel() * 2
    copied = nbytes / best(lambda: target.copy_(weights), options.device)
    hashed = nbytes / best(lambda: digest_tensor("w", weights), options.device)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "bytes": nbytes,
        "copy_gb_per_s": round(copied / 1e9, 3),
        "digest_gb_per_s": round(hashed / 1e9, 3),
        "digest_to_copy": round(hashed / copied, 4),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
