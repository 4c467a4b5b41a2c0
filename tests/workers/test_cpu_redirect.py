"""The redirect to the CPU: what it sends there, for which thread, how long, and where it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workers.megatron.cpu import CudaInUse, needed, redirect

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where `cuda` is an error")


def test_only_the_cpu_needs_it() -> None:
    assert needed("cpu")
    assert not needed("cuda")


@without_cuda
def test_what_names_cuda_happens_on_the_cpu() -> None:
    with redirect():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.zeros(2, pin_memory=True).device.type == "cpu"
        torch.cuda.synchronize()


def test_cuda_returns_the_same_tensor_and_keeps_parameters_parameters() -> None:
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    with redirect():
        assert weight.cuda() is weight
        module.cuda(torch.cuda.current_device())
    assert module.weight is weight


def test_types_are_reported_as_megatrons_optimizers_expect() -> None:
    with redirect():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_torch_is_as_before_afterwards_also_when_the_body_raises() -> None:
    before = (torch.cuda.current_device, torch.cuda.synchronize)
    with pytest.raises(KeyError), redirect(), redirect():
        raise KeyError
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_for_cuda_nothing_is_replaced() -> None:
    before = torch.cuda.current_device
    with redirect("cuda"):
        assert torch.cuda.current_device is before
        assert torch.zeros(1).type() == "torch.FloatTensor"


@without_cuda
def test_every_thread_opens_its_own() -> None:
    def allocate() -> torch.Tensor:
        return torch.zeros(1, device="cuda")

    def allocate_redirected() -> torch.Tensor:
        with redirect():
            return allocate()

    with redirect(), ThreadPoolExecutor(1) as other:
        with pytest.raises((AssertionError, RuntimeError)):
            other.submit(allocate).result(timeout=10)
        assert other.submit(allocate_redirected).result(timeout=10).device.type == "cpu"


def test_a_thread_that_leaves_does_not_end_it_for_another() -> None:
    before = torch.cuda.current_device
    entered, leave = threading.Event(), threading.Event()

    def stay() -> object:
        with redirect():
            entered.set()
            assert leave.wait(10)
            return torch.cuda.current_device()

    with ThreadPoolExecutor(1) as other:
        staying = other.submit(stay)
        assert entered.wait(10)
        with redirect():
            pass
        leave.set()
        assert staying.result(timeout=10) == "cpu"
    assert torch.cuda.current_device is before


def test_it_refuses_in_a_process_that_computes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(CudaInUse, match="CUDA_VISIBLE_DEVICES"), redirect():
        pass
    assert torch.cuda.current_device is before
    with redirect("cuda"):
        pass
