import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.weights.buckets import ITEMSIZE, TensorSpec, pack
from workers.weights.views import torch_dtype, views

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"]
specs = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=12,
).map(lambda items: [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(items)])


@given(specs, st.integers(1, 400))
def test_any_bucket_size_carries_every_tensor_once_in_order(tensors: list[TensorSpec], bucket_bytes: int):
    buckets = pack(tensors, bucket_bytes)
    assert [entry.tensor for bucket in buckets for entry in bucket.entries] == tensors
    for bucket in buckets:
        assert bucket.nbytes <= bucket_bytes or len(bucket.entries) == 1
        end = 0
        for entry in bucket.entries:
            assert entry.offset % torch_dtype(entry.tensor.dtype).itemsize == 0
            assert entry.offset == end
            end = entry.offset + entry.tensor.nbytes
        assert end == bucket.nbytes


@pytest.mark.parametrize(("name", "itemsize"), ITEMSIZE.items())
def test_a_plan_counts_the_bytes_of_torch(name: str, itemsize: int):
    assert torch_dtype(name).itemsize == TensorSpec("a", name, ()).nbytes == itemsize


def test_nothing_to_send_is_no_bucket():
    assert pack([], 1) == ()


def test_a_tensor_bigger_than_a_bucket_goes_alone():
    small, big = TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (100,))
    assert [[e.tensor.name for e in b.entries] for b in pack([small, big, small], 64)] == [["a"], ["b"], ["a"]]


def test_a_tensor_that_fits_exactly_shares_its_bucket():
    a, b = TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (4,))
    assert len(pack([a, b], 32)) == 1
    assert len(pack([a, b], 31)) == 2


def test_a_tensor_that_would_not_be_aligned_begins_a_bucket():
    odd, wide = TensorSpec("a", "bfloat16", (3,)), TensorSpec("b", "float32", (2,))
    assert [[e.tensor.name for e in b.entries] for b in pack([odd, wide, odd], 64)] == [["a"], ["b", "a"]]


def test_an_impossible_bucket_size_is_refused():
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, not 0"):
        pack([], 0)


@given(specs)
def test_views_on_both_sides_agree_on_every_byte(tensors: list[TensorSpec]):
    generator = torch.Generator().manual_seed(0)
    for bucket in pack(tensors, 200):
        sent = torch.zeros(bucket.nbytes + 5, dtype=torch.uint8)
        written = {}
        for spec, view in views(bucket, sent):
            raw = torch.randint(0, 2, (spec.nbytes,), dtype=torch.uint8, generator=generator)
            value = raw.view(torch_dtype(spec.dtype)).view(spec.shape)
            view.copy_(value)
            written[spec.name] = raw
        for spec, view in views(bucket, sent.clone()):
            assert view.shape == spec.shape
            assert torch.equal(view.reshape(-1).view(torch.uint8), written[spec.name])


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="no transport for dtype complex64; there is one for bfloat16"):
        torch_dtype("complex64")
