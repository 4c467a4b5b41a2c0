"""What it costs the driver that a thousand ranks agree: attestations as they arrive, unpacked and found unanimous.

    python benchmarks/agreement.py [--out benchmarks/results/agreement.json]

Simulated are the ranks of a 36-layer model of 8e9 parameters: 8 tensor-parallel x 8 pipeline stages x 16 replicas. Each
attestation arrives as the bytes that a rank sends. What Ray adds to fetch a result is not in it.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reporting import report
from state.digest_records import PieceDigest, Region, ShardDigest
from state.gang import Attestation, GangId, agree
from state.slots import Slot, WorkerId

TP, PP, DP, LAYERS = 8, 8, 16, 36
HIDDEN, QUERY, KEY_VALUE, HEAD, FFN, VOCABULARY = 4096, 4096, 1024, 128, 12288, 151936
WHOLE = -1


def tensors(stage: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, full shape and the dimension along which it is cut over tensor-parallel ranks, of one pipeline stage."""
    counts = [LAYERS // PP + (s < LAYERS % PP) for s in range(PP)]
    first = sum(counts[:stage])
    if stage == 0:
        yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0
    for layer in range(first, first + counts[stage]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (HIDDEN,), WHOLE
        yield f"{prefix}self_attn.q_proj.weight", (QUERY, HIDDEN), 0
        yield f"{prefix}self_attn.k_proj.weight", (KEY_VALUE, HIDDEN), 0
        yield f"{prefix}self_attn.v_proj.weight", (KEY_VALUE, HIDDEN), 0
        yield f"{prefix}self_attn.q_norm.weight", (HEAD,), WHOLE
        yield f"{prefix}self_attn.k_norm.weight", (HEAD,), WHOLE
        yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, QUERY), 1
        yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,), WHOLE
        yield f"{prefix}mlp.gate_proj.weight", (FFN, HIDDEN), 0
        yield f"{prefix}mlp.up_proj.weight", (FFN, HIDDEN), 0
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, FFN), 1
    if stage == PP - 1:
        yield "model.norm.weight", (HIDDEN,), WHOLE
        yield "lm_head.weight", (VOCABULARY, HIDDEN), 0


def shard(tp: int, stage: int) -> ShardDigest:
    pieces = []
    for name, full, cut in tensors(stage):
        offset, shape = [0] * len(full), list(full)
        if cut != WHOLE:
            shape[cut] //= TP
            offset[cut] = tp * shape[cut]
        region = Region(full, tuple(offset), tuple(shape))
        pieces.append(PieceDigest(name, "bfloat16", region, random.Random(f"{name}{offset}").getrandbits(64)))
    return ShardDigest.of(pieces)


def sent(drifted: bool) -> list[bytes]:
    """What every rank sends. `drifted`: the last one holds another norm than its replicas."""
    gang, shards = GangId(TP * PP * DP, 1, "c0ffee"), {(t, p): shard(t, p) for t in range(TP) for p in range(PP)}
    packed = []
    for rank in range(TP * PP * DP):
        live = shards[rank % TP, rank // (TP * DP)]
        if drifted and rank == TP * PP * DP - 1:
            first, *rest = live.pieces
            live = ShardDigest.of([PieceDigest(first.name, first.dtype, first.region, first.value ^ 1), *rest])
        worker = WorkerId("run", "actor", rank)
        attestation = Attestation(worker, gang, "resident.actor", Slot.ACTOR, 7, live, live.summary, 100 + rank % 3)
        packed.append(pickle.dumps(attestation, pickle.HIGHEST_PROTOCOL))
    return packed


def measure(packed: list[bytes], repeats: int) -> dict[str, Any]:
    """Milliseconds of the driver, in wall and in processor time."""
    unpacking, agreeing, processor = [], [], []
    for _ in range(repeats):
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        attestations = [pickle.loads(one) for one in packed]
        arrived = time.perf_counter()
        quorum = agree(attestations, "p")
        agreed = time.perf_counter()
        processor.append(time.process_time() - cpu)
        unpacking.append(arrived - began)
        agreeing.append(agreed - arrived)
        assert len(quorum.tensors) == LAYERS * 11 + 3
    totals = [a + b for a, b in zip(unpacking, agreeing, strict=True)]
    return {
        "ranks": len(packed),
        "tensors": len(quorum.tensors),
        "bytes_per_rank": max(map(len, packed)),
        "unpack_ms": _ms(median(unpacking)),
        "agree_ms": _ms(median(agreeing)),
        "total_ms": _ms(median(totals)),
        "worst_total_ms": _ms(max(totals)),
        "processor_ms": _ms(median(processor)),
    }


def found(packed: list[bytes]) -> dict[str, Any]:
    """How long it takes to name the rank that drifted, and the words."""
    began = time.perf_counter()
    try:
        agree([pickle.loads(one) for one in packed], "p")
    except Exception as error:
        return {"drift_found_ms": _ms(time.perf_counter() - began), "drift_found": str(error).splitlines()[-1].strip()}
    raise AssertionError("a rank that drifted was not found")


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **measure(sent(drifted=False), options.repeats),
        **found(sent(drifted=True)),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
