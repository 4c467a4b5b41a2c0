"""All ways to hash against element by element: any box of any tensor, however it stands in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from state import digest
from state.digest import Piece, digest_pieces, digest_tensor, eager_sums
from state.digest_records import MASK64, Region
from state.mixing import mix

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)
RAW_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}
Sums = Callable[[Sequence[tuple[Tensor, Region]]], Tensor]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the kernel is Triton's")


def random_part(random: random.Random, device: str) -> tuple[Tensor, Region]:
    """A box of a tensor of up to four dimensions, with runs of the mixer that end within its rows or between them."""
    dtype, rank = random.choice(DTYPES), random.randint(0, 4)
    full = [random.choice((1, 2, 3, 5, 8, 16, 64)) for _ in range(rank)]
    if rank and random.random() < 0.6:
        full[-1] = random.choice((1000, 1024, 1536, 2048, 4096, 5000))
    if rank and random.random() < 0.1:
        full[random.randrange(rank)] = 0
    while math.prod(full) > 100_000:
        full[random.randrange(rank)] = 1
    offset = [random.choice((0, n // 2, random.randint(0, n))) for n in full]
    shape = [random.choice((n - o, (n - o) // 2, random.randint(0, n - o))) for n, o in zip(full, offset, strict=True)]
    size = math.prod(full) * dtype.itemsize
    whole = torch.tensor(list(random.randbytes(size)), dtype=torch.uint8)
    if dtype == torch.bool:
        whole &= 1
    whole = whole.view(dtype).reshape(full).to(device)
    box = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    return _stood(box, random), Region(tuple(full), tuple(offset), tuple(shape))


def _stood(box: Tensor, random: random.Random) -> Tensor:
    """The same values as they stand, in one piece, off any alignment, with other dimensions innermost, or with gaps."""
    order = random.sample(range(box.dim()), box.dim())
    match random.randrange(5):
        case 0:
            return box
        case 1:
            return box.contiguous()
        case 2:
            memory = torch.empty(box.numel() + 3, dtype=box.dtype, device=box.device)
            return memory[3:].view(box.shape).copy_(box)
        case 3:
            return box.permute(order).contiguous().permute([order.index(d) for d in range(box.dim())])
        case _:
            memory = torch.empty([2 * n for n in box.shape], dtype=box.dtype, device=box.device)
            return memory[tuple(slice(None, None, 2) for _ in box.shape)].copy_(box)


def element_by_element(tensor: Tensor, region: Region) -> int:
    """The definition, with no regard to rows, runs or time."""
    box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
    index = torch.arange(math.prod(region.full_shape)).reshape(region.full_shape)[box]
    raw = tensor.cpu().contiguous().view(RAW_BITS[tensor.element_size()]).to(torch.int64)
    return int((mix(index) * raw).sum())


def differing(sums: Sums, device: str, parts: int, seed: int) -> list[tuple[int, int, Region]]:
    chance = random.Random(seed)
    held = [random_part(chance, device) for _ in range(parts)]
    pairs = [(ours, element_by_element(*part), part[1]) for ours, part in zip(sums(held).tolist(), held, strict=True)]
    return [pair for pair in pairs if pair[0] != pair[1]]


def test_what_needs_no_kernel_computes_what_is_defined() -> None:
    assert differing(eager_sums, "cpu", 150, 1) == []


@pytest.mark.parametrize("share", [700, 1 << 22])
def test_the_loop_on_a_cpu_computes_what_is_defined(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from state import digest_cpu

    monkeypatch.setattr(digest_cpu, "_SHARE", share)
    assert differing(digest_cpu.sums, "cpu", 150, 0) == []


@needs_gpu
@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_on_a_gpu_computes_what_is_defined(seed: int) -> None:
    from state import digest_cuda

    assert differing(digest_cuda.sums, "cuda", 400, seed) == []


@needs_gpu
def test_a_gpu_and_a_cpu_give_the_same_digest_of_a_large_tensor() -> None:
    whole = torch.randn(5000, 4096, dtype=torch.bfloat16)
    there = whole.cuda()
    assert digest_tensor("w", there) == digest_tensor("w", whole)
    columns = Piece("w", Region((5000, 4096), (0, 1536), (5000, 1536)), there[:, 1536:3072])
    here = Piece("w", columns.region, whole[:, 1536:3072])
    assert digest_pieces([columns]) == digest_pieces([here])


@needs_gpu
def test_thousands_of_pieces_on_a_gpu_are_each_given_their_own_digest() -> None:
    tensors = [torch.randn(1 + n % 7, 256, device="cuda") for n in range(2000)]
    found = digest_pieces(Piece(f"{n:04}", Region.whole(t.shape), t) for n, t in enumerate(tensors))
    assert [p.value for p in found.pieces] == [
        v & MASK64 for v in eager_sums([(t, Region.whole(t.shape)) for t in tensors]).tolist()
    ]


def test_a_large_tensor_on_a_cpu_is_hashed_by_the_loop_and_a_small_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_WORTH_A_KERNEL", 1000)
    large, small = torch.randn(250), torch.randn(249)
    assert chosen(large).__module__ == "state.digest_cpu"
    assert chosen(small) is eager_sums
    assert digest_tensor("w", large).value == int(eager_sums([(large, Region.whole((250,)))])) & MASK64


def test_where_only_torch_is_there_the_definition_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine's process."""
    monkeypatch.setattr(digest, "_WORTH_A_KERNEL", 0)
    monkeypatch.setattr(digest, "find_spec", lambda name: None)
    assert chosen(torch.zeros(10)) is eager_sums


def chosen(tensor: Tensor) -> Sums:
    return digest._kernel(tensor.device, [(tensor, Region.whole(tensor.shape))])
