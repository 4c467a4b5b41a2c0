"""How fast weights are hashed beside how fast the same machine copies them, in one run. Prints one JSON.

    python benchmarks/digest.py --megabytes 768
    python benchmarks/digest.py --device cuda --dtypes bfloat16 --megabytes 4096 8192 --tensor-parallel-size 1 2

Layers of the shape of Qwen3-8B stand in one buffer as Megatron keeps them, and are hashed where they stand: a piece for
each group of queries, each key and value head, gate and up. `digest_to_copy` is the time of a copy of that buffer over
the time of `digest_pieces`, table, wait and summary included: 1 is as fast as a copy, which moves each byte twice.
`definition_gb_per_s` is the code that needs no kernel.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reporting import report
from state.digest import Piece, digest_pieces, eager_sums
from state.digest_records import Region

HIDDEN, FFN, HEAD, QUERIES, GROUPS = 4096, 12288, 128, 32, 8
QKV_ROWS = (QUERIES + 2 * GROUPS) * HEAD
LAYER = HIDDEN * (QKV_ROWS + QUERIES * HEAD + 3 * FFN + 2) + 2 * HEAD


def pieces(flat: Tensor, layers: int, tp: int) -> Iterator[Piece]:
    """What one of `tp` ranks holds, the first, of `layers` layers that stand one behind the other in `flat`."""
    begin = 0

    def taken(*shape: int) -> Tensor:
        nonlocal begin
        part = flat[begin:].as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,))
        begin += part.numel()
        return part

    def rows(name: str, full: int, offset: int, part: Tensor) -> Piece:
        return Piece(name, Region((full, HIDDEN), (offset, 0), tuple(part.shape)), part)

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            yield Piece(f"{prefix}{norm}.weight", Region.whole((size,)), taken(size))
        for norm in ("q_norm", "k_norm"):
            yield Piece(f"{prefix}self_attn.{norm}.weight", Region.whole((HEAD,)), taken(HEAD))
        fused, queries = taken(QKV_ROWS // tp, HIDDEN), QUERIES // GROUPS * HEAD
        for group in range(GROUPS // tp):
            query, key, value = fused[group * (queries + 2 * HEAD) :][: queries + 2 * HEAD].split([queries, HEAD, HEAD])
            yield rows(f"{prefix}self_attn.q_proj.weight", QUERIES * HEAD, group * queries, query)
            yield rows(f"{prefix}self_attn.k_proj.weight", GROUPS * HEAD, group * HEAD, key)
            yield rows(f"{prefix}self_attn.v_proj.weight", GROUPS * HEAD, group * HEAD, value)
        gate, up = taken(2 * FFN // tp, HIDDEN).chunk(2)
        yield rows(f"{prefix}mlp.gate_proj.weight", FFN, 0, gate)
        yield rows(f"{prefix}mlp.up_proj.weight", FFN, 0, up)
        for name, columns in (("self_attn.o_proj", QUERIES * HEAD), ("mlp.down_proj", FFN)):
            part = taken(HIDDEN, columns // tp)
            yield Piece(f"{prefix}{name}.weight", Region((HIDDEN, columns), (0, 0), tuple(part.shape)), part)


def best(work: Callable[[], object], device: str, repeats: int = 7) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def measure(device: str, dtype: torch.dtype, megabytes: int, tp: int) -> dict[str, Any]:
    layers = max(1, round(megabytes * 2**20 * tp / (LAYER * dtype.itemsize)))
    flat = torch.empty(layers * (LAYER + (tp - 1) * 2 * (HIDDEN + HEAD)) // tp, dtype=dtype, device=device)
    for part in flat.split(1 << 26):
        part.normal_()
    target = torch.empty_like(flat)
    held = list(pieces(flat, layers, tp))
    nbytes = sum(p.region.numel * dtype.itemsize for p in held)
    assert nbytes == flat.nbytes
    some = [(piece.tensor, piece.region) for piece in held[: len(held) // layers]]
    few = sum(region.numel * dtype.itemsize for _, region in some)
    copied = nbytes / best(lambda: target.copy_(flat), device)
    hashed = nbytes / best(lambda: digest_pieces(held), device)
    defined = few / best(lambda: eager_sums(some), device, 3)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": tp,
        "bytes": nbytes,
        "pieces": len(held),
        "copy_gb_per_s": round(copied / 1e9, 3),
        "digest_gb_per_s": round(hashed / 1e9, 3),
        "digest_to_copy": round(hashed / copied, 4),
        "definition_gb_per_s": round(defined / 1e9, 3),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--megabytes", type=int, nargs="+", default=[768])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, help="of torch, for copies and for the code without a kernel")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtypes = {name: getattr(torch, name) for name in options.dtypes}
    result = {
        "benchmark": "digest",
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "results": [
            measure(options.device, dtype, megabytes, tp)
            for tp in options.tensor_parallel_size
            for megabytes in options.megabytes
            for dtype in dtypes.values()
        ],
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
