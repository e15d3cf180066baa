"""An embedding on an NPU that is not the current one. The reference is the same embedding on the current one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rec_sdk_torch import AccumulateAdagrad
from rec_sdk_torch.backends import backend_for, parse_device
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer


@pytest.fixture
def other(device: torch.device) -> torch.device:
    if device.type != "npu" or torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    return torch.device("npu", 1 - (device.index or 0))


def train(device: torch.device) -> list[torch.Tensor]:
    """Outputs, gradients and weights of a training with swaps and open windows."""
    options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 2}
    optimizer = TableOptimizer.create(AccumulateAdagrad, options)
    tables = [TableConfig(name, 50, 4, pooling=Pooling.MEAN) for name in "ab"]
    embedding = TableBatchedEmbedding(tables, optimizer=optimizer, cache=4, device=device, seed=0)
    results = []
    for step in range(6):
        weights = torch.rand(8, generator=torch.Generator().manual_seed(step)).to(device).requires_grad_()
        ids = torch.arange(8) % 4 + 3 * step
        out = embedding(ids, torch.tensor([0, 3, 4, 6, 8]), weights)
        out.pow(2).sum().backward()
        assert out.device == device
        assert weights.grad is not None
        results += [out.detach().cpu(), weights.grad.cpu()]
    return [*results, embedding.eval()(torch.arange(40), torch.tensor([0, 10, 20, 30, 40])).cpu()]


def test_trains_as_on_the_current_device(device: torch.device, other: torch.device) -> None:
    for found, expected in zip(train(other), train(device), strict=True):
        assert torch.equal(found, expected)


def test_memory_is_that_of_the_device_asked_for(device: torch.device, other: torch.device) -> None:
    free = [backend_for(where).free_memory(where) for where in (device, other)]
    cache = backend_for(other).allocate_cache(1 << 10, 1 << 16, other)
    assert cache.device == other
    now = [backend_for(where).free_memory(where) for where in (device, other)]
    assert now[0] == free[0]
    assert now[1] <= free[1] - cache.numel()


def test_memory_is_known_to_a_new_thread(device: torch.device) -> None:
    """It has no current device yet."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backend_for(device).free_memory, device).result() > 0


def test_npu_without_an_index_is_the_current_one(other: torch.device) -> None:
    with torch.npu.device(other):
        assert parse_device("npu") == other
