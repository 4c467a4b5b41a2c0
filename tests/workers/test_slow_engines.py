"""An engine that takes its time before it keeps what arrived holds every bucket all the same: a buffer is used again
only when everybody is done with it."""

from __future__ import annotations

import time

import pytest
from torch import Tensor

from tests.workers import test_distributed_transport as distributed
from tests.workers import test_ipc_transport as ipc
from tests.workers.test_distributed_transport import ENGINES
from workers.weights.buckets import TensorSpec

LAZY_S = 0.05


class LazyHeld(distributed.Held):
    """Keeps each tensor a while after it was handed over."""

    def sink(self, spec: TensorSpec, tensor: Tensor) -> None:
        time.sleep(LAZY_S)
        super().sink(spec, tensor)


@pytest.mark.parametrize("lazy", ENGINES)
def test_over_a_process_group(lazy: str) -> None:
    transfer = distributed.Transfer(bucket_bytes=64)
    transfer.held[lazy] = LazyHeld()
    transfer.sinks[lazy] = transfer.held[lazy].sink
    assert len(transfer.plan.streams[0].buckets) > 2
    try:
        assert {f.result() for f in transfer.run().values()} == {transfer.plan.nbytes}
    finally:
        transfer.close()
    for held in transfer.held.values():
        held.check()


@pytest.mark.parametrize("lazy", ENGINES)
def test_over_shared_memory(lazy: str) -> None:
    transfer = ipc.Transfer()
    transfer.held[lazy] = LazyHeld()
    assert {f.result() for f in transfer.run().values()} == {transfer.plan.nbytes}
    for held in transfer.held.values():
        held.check()
