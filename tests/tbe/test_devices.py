"""An embedding on a device other than the current one trains the same; missing devices are reported."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of, windowed

from rec_sdk_torch.operators.devices import cuda
from rec_sdk_torch.operators.devices.backends import backend_for, parse_device
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig


@pytest.fixture
def other(device: torch.device) -> torch.device:
    if device.type == "cpu" or torch.get_device_module(device).device_count() < 2:
        pytest.skip("needs two devices")
    return torch.device(device.type, 1 - (device.index or 0))


def train(device: torch.device) -> list[torch.Tensor]:
    """Trains with swaps and accumulation windows; returns outputs, gradients and weights."""
    tables = [TableConfig(name, 50, 4, pooling=Pooling.MEAN) for name in "ab"]
    embedding = embedding_of(*tables, optimizer=windowed("Adagrad", 2, lr=0.1), cache=4, device=device)
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


def test_memory_is_allocated_on_the_requested_device(device: torch.device, other: torch.device) -> None:
    torch.get_device_module(device).empty_cache()
    free = [backend_for(where).free_memory(where) for where in (device, other)]
    cache = backend_for(other).allocate_cache(1 << 10, 1 << 16, other)
    assert cache.device == other
    now = [backend_for(where).free_memory(where) for where in (device, other)]
    assert now[0] == free[0]
    assert now[1] <= free[1] - cache.numel()


def test_memory_is_known_to_a_new_thread(device: torch.device) -> None:
    """The memory of a device is also reported in a new thread, which has no current device yet."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backend_for(device).free_memory, device).result() > 0


def test_without_an_index_the_device_is_the_current_one(other: torch.device) -> None:
    with torch.get_device_module(other).device(other):
        assert parse_device(other.type) == other


def test_an_int_is_an_accelerator(device: torch.device) -> None:
    """An int is an accelerator, as in `torch.device(0)`, and never the host."""
    if device.type != "cpu":
        assert parse_device(0) == torch.device(device.type, 0)
        assert TableBatchedEmbedding([TableConfig("t", 10, 4)], device=0).device == torch.device(device.type, 0)
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        for index in (0, np.int64(1)):
            with pytest.raises(ValueError, match=rf"device {index}: an int is .*accelerator.*The host is 'cpu'"):
                parse_device(index)
            with pytest.raises(ValueError, match=f"device {index}"):
                TableBatchedEmbedding([TableConfig("t", 10, 4)], device=index)
    elif not torch.accelerator.is_available():  # for CUDA builds of torch on a machine without a GPU
        with pytest.raises(ImportError, match=f"device '{accelerator.type}'"):
            parse_device(0)
    else:
        assert str(parse_device(0)) == f"{accelerator.type}:0"


@pytest.mark.parametrize("given", [True, 1.5, ["cpu"]])
def test_invalid_device_types_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=f"device is {re.escape(repr(given))}, expected"):
        parse_device(given)


def test_an_empty_string_is_no_device() -> None:
    with pytest.raises(ValueError, match=r"device is '': .* must not be empty"):
        parse_device("")


def test_a_missing_device_is_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("there is one host")
    count = torch.get_device_module(device).device_count()
    with pytest.raises(ValueError, match=rf"'{device.type}:{count}': there are {count} .*, 0 to {count - 1}"):
        TableBatchedEmbedding([TableConfig("t", 10, 4)], device=f"{device.type}:{count}")


def test_missing_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ImportError, ValueError), match="device 'cuda'"):
        TableBatchedEmbedding([TableConfig("t", 10, 4)], device="cuda")


def test_cuda_without_its_software(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = cuda.load_operators.__wrapped__  # this process may have loaded the operators already
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ImportError, match=r"needs a CUDA build of torch; torch .* is one without"):
        load()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "_OPERATORS", tmp_path / "_ops_cuda.so")
    with pytest.raises(ImportError, match=r"_ops_cuda.so is missing.* nvcc .*pip install --no-build-isolation"):
        load()
    cuda._OPERATORS.write_text("not a library")
    with pytest.raises(ImportError, match=r"_ops_cuda.so does not load with torch .*pip install"):
        load()


def test_missing_cuda_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="'cuda': torch finds no GPU"):
        cuda.start(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="'cuda:2': there are 2 GPUs, 0 to 1"):
        cuda.start(torch.device("cuda:2"))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
def test_cache_on_the_host_may_have_huge_pages() -> None:
    cache = backend_for(torch.device("cpu")).allocate_cache(5000, 1024, torch.device("cpu"))
    assert cache.shape == (5000, 1024)
    assert cache.data_ptr() % (2 << 20) == 0
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= cache.data_ptr() < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags, "advised"
    assert " sh" not in flags, "shared memory follows a setting of its own, which is off by default"
