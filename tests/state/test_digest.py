"""Digests against a slow reference, and what they see."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from state.digest import Piece, digest_pieces, digest_region, digest_tensor
from state.digest_records import Region
from state.mixing import mix, splitmix

M = (1 << 64) - 1
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]


def reference_splitmix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return (z ^ (z >> 31)) | 1


def reference_mix(index: int) -> int:
    high, low = divmod(index, 1024)
    return reference_splitmix(high) * reference_splitmix(-1 - low) & M


def reference(tensor: torch.Tensor, region: Region) -> int:
    bits = tensor.contiguous().view(UNSIGNED[tensor.element_size()]).flatten().tolist()
    total = 0
    for position, raw in zip(itertools.product(*map(range, region.shape)), bits, strict=True):
        index = 0
        for coordinate, start, size in zip(position, region.offset, region.full_shape, strict=True):
            index = index * size + coordinate + start
        total += raw * reference_mix(index)
    return total & M


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@given(st.integers(0, M >> 1))
def test_mix_is_the_reference_and_odd(index: int) -> None:
    assert int(splitmix(torch.tensor([index])).item()) & M == reference_splitmix(index)
    assert int(mix(torch.tensor([index])).item()) & M == reference_mix(index)
    assert reference_mix(index) % 2 == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.integers(0, 1000), st.data())
def test_any_box_of_any_tensor_is_the_reference(
    full: list[int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, n)) for n in full)
    shape = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(full, offset, strict=True))
    region = Region(tuple(full), offset, shape)
    part = random_tensor(shape, dtype, seed)
    assert digest_region(part, region) == reference(part, region)


LONG = [((5000,), (0,), (5000,)), ((5000,), (1000,), (2100,)), ((3, 2, 1500), (1, 0, 20), (2, 2, 1010))]
SLICED = [((6, 1024), (0, 512), (6, 512)), ((9, 640), (2, 100), (7, 300)), ((4, 2500), (0, 1), (4, 2498))]


@pytest.mark.parametrize(("full", "offset", "shape"), LONG + SLICED)
def test_boxes_within_and_across_the_runs_of_the_mixer_are_the_reference(
    full: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    region, part = Region(full, offset, shape), random_tensor(shape, torch.bfloat16, 5)
    assert digest_region(part, region) == reference(part, region)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000), st.data())
def test_shards_add_up_to_the_whole(rows: int, columns: int, seed: int, data: st.DataObject) -> None:
    whole = random_tensor((rows, columns), torch.bfloat16, seed)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    total = 0
    for r0, r1 in ((0, row), (row, rows)):
        for c0, c1 in ((0, column), (column, columns)):
            region = Region((rows, columns), (r0, c0), (r1 - r0, c1 - c0))
            total += digest_region(whole[r0:r1, c0:c1], region)  # views, not contiguous
    assert total & M == digest_tensor("w", whole).value


def test_a_tensor_larger_than_one_chunk_is_hashed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_tensor((7, 5), torch.float32, 0)
    at_once = digest_tensor("w", whole)
    monkeypatch.setattr("state.digest._CPU_CHUNK", 11)
    assert digest_tensor("w", whole) == at_once


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    tensor = random_tensor((4,), dtype, 3)
    before = digest_tensor("w", tensor).value
    raw = tensor.view(torch.uint8)
    for byte, bit in itertools.product(range(raw.numel()), range(8)):
        raw[byte] ^= 1 << bit
        assert digest_tensor("w", tensor).value != before
        raw[byte] ^= 1 << bit
    assert digest_tensor("w", tensor).value == before


def test_a_permutation_and_a_transposition_are_seen() -> None:
    tensor = random_tensor((6, 6), torch.bfloat16, 1)
    before = digest_tensor("w", tensor).value
    assert digest_tensor("w", tensor[[1, 0, 2, 3, 4, 5]]).value != before
    assert digest_tensor("w", tensor.t()).value != before


def test_what_stands_a_whole_run_further_on_is_told_apart() -> None:
    """Runs that change places; and corners of a rectangle, which weights that were sums of two factors would miss."""
    whole = random_tensor((4, 1024), torch.bfloat16, 1)
    assert digest_tensor("w", whole[[1, 0, 2, 3]]) != digest_tensor("w", whole)
    falling, rising = torch.zeros(2, 4, 1024, dtype=torch.bfloat16)
    falling[0, 0] = falling[1, 7] = 1
    rising[1, 0] = rising[0, 7] = 1
    assert digest_tensor("w", falling) != digest_tensor("w", rising)


@pytest.mark.parametrize("n", [2, 4, 64, 4096])
def test_constants_differ_from_each_other_and_from_zero(n: int) -> None:
    values = {digest_tensor("w", torch.full((n,), c)).value for c in (0.0, 1.0, -1.0, 2.0, 0.5)}
    assert len(values) == 5


def summary(**tensors: torch.Tensor) -> str:
    return digest_pieces(Piece(name, Region.whole(t.shape), t) for name, t in tensors.items()).summary


def test_swapped_tensors_are_seen() -> None:
    a, b = random_tensor((4, 4), torch.bfloat16, 1), random_tensor((4, 4), torch.bfloat16, 2)
    assert summary(a=a, b=b) != summary(a=b, b=a)


def test_another_dtype_or_shape_of_the_same_bytes_is_seen() -> None:
    zeros = torch.zeros(8, dtype=torch.bfloat16)
    assert digest_tensor("w", zeros) != digest_tensor("w", zeros.view(torch.float16))
    assert summary(w=zeros) != summary(w=zeros.view(torch.float16))
    assert summary(w=zeros) != summary(w=zeros.view(2, 4))


def test_the_summary_does_not_depend_on_the_order_of_pieces() -> None:
    a, b = random_tensor((4,), torch.bfloat16, 1), random_tensor((4,), torch.bfloat16, 2)
    assert summary(a=a, b=b) == summary(b=b, a=a)


def test_minus_zero_is_not_zero_and_nan_is_equal_to_itself() -> None:
    assert digest_tensor("w", torch.tensor([-0.0])) != digest_tensor("w", torch.tensor([0.0]))
    nan = torch.tensor([float("nan")])
    assert digest_tensor("w", nan) == digest_tensor("w", nan.clone())


def test_a_tensor_that_is_not_its_region_is_refused() -> None:
    with pytest.raises(ValueError, match="is not"):
        digest_region(torch.zeros(3), Region.whole((4,)))
    with pytest.raises(ValueError, match="does not fit"):
        Region((4,), (2,), (3,))


def test_the_file_imports_only_torch() -> None:
    """It also runs inside an engine's process."""
    code = (
        "import sys, state.digest; assert not {m.split('.')[0] for m in sys.modules} & {'transitions', 'ray', 'numba'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
