import pytest

from state.digest_records import Region, TensorDigest
from workers.weights.send_plan import plan_send


def tensor(name: str, *shape: int) -> TensorDigest:
    return TensorDigest(name, "float32", shape, 0)


def rows(full: int, start: int, count: int) -> Region:
    return Region((full, 2), (start, 0), (count, 2))


NORM, QKV, HEAD = tensor("norm", 4), tensor("qkv", 6, 2), tensor("head", 3)
HOLDERS = {
    "norm": ((2, Region.whole((4,))),),
    "qkv": ((1, rows(6, 3, 3)), (0, rows(6, 0, 3))),
    "head": ((2, Region.whole((3,))),),
}


@pytest.mark.parametrize("bucket_bytes", [1, 16, 48, 1 << 20])
def test_the_lowest_holder_leads_a_tensor_for_every_bucket_size(bucket_bytes: int):
    plan = plan_send(HOLDERS, [HEAD, NORM, QKV], bucket_bytes)
    assert plan.leaders == (0, 2)
    first, second = plan.streams
    assert [e.tensor.name for b in first.buckets for e in b.entries] == ["qkv"]
    assert [e.tensor.name for b in second.buckets for e in b.entries] == ["head", "norm"]
    assert first.holders == {"qkv": HOLDERS["qkv"]}
    assert sorted(t.name for t in plan.tensors) == ["head", "norm", "qkv"]


def test_an_empty_publish_is_an_empty_plan():
    assert plan_send({}, [], 100).streams == ()


def test_a_tensor_that_nobody_holds_is_named():
    with pytest.raises(ValueError, match=r"no rank holds \['head'\]"):
        plan_send({k: v for k, v in HOLDERS.items() if k != "head"}, [HEAD, NORM, QKV], 100)
    with pytest.raises(ValueError, match="no rank holds norm"):
        plan_send({"norm": ()}, [NORM], 100)


def test_a_tensor_that_is_held_but_not_published_is_named():
    with pytest.raises(ValueError, match=r"held but not published: \['qkv'\]"):
        plan_send(HOLDERS, [HEAD, NORM], 100)


def test_a_tensor_published_twice_is_named():
    with pytest.raises(ValueError, match=r"published twice: \['norm'\]"):
        plan_send({"norm": HOLDERS["norm"]}, [NORM, NORM], 100)


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        ([rows(6, 0, 3)], "hold 6 of 12 elements"),
        ([rows(6, 0, 3), rows(6, 2, 4)], "is held twice"),
        ([rows(6, 0, 6), rows(6, 0, 6)], "is held twice"),
        ([Region.whole((6, 3))], r"qkv is \[6, 2\], but a rank holds"),
    ],
    ids=["gap", "overlap", "replica", "shape"],
)
def test_regions_must_cover_a_tensor_exactly_once(regions: list[Region], words: str):
    with pytest.raises(ValueError, match=words):
        plan_send({"qkv": tuple(enumerate(regions))}, [QKV], 100)


def test_a_scalar_has_one_holder():
    scalar = Region.whole(())
    assert plan_send({"s": ((0, scalar),)}, [tensor("s")], 100).nbytes == 4
    with pytest.raises(ValueError, match="is held twice"):
        plan_send({"s": ((0, scalar), (1, scalar))}, [tensor("s")], 100)
