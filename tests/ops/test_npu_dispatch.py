"""On which stream and device an operator runs, and whose memory it uses meanwhile. The reference is the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from op_batches import coefficients, int32

import rec_sdk_torch.ops  # noqa: F401

ROWS, LOOKUPS, DIM = 20, 5000, 8  # rows hot enough for a workspace


def operands() -> list[torch.Tensor]:
    """Records, slots, gradients, and the rest of what update_rows takes."""
    generator = torch.Generator().manual_seed(0)
    records = torch.randn(ROWS, DIM, generator=generator).view(torch.uint8)
    slots = int32(torch.randperm(ROWS, generator=generator))
    grad = torch.randn(LOOKUPS, DIM, generator=generator)
    offsets = int32(torch.arange(0, LOOKUPS + 1, LOOKUPS // ROWS))
    lookups = int32(torch.randperm(LOOKUPS, generator=generator))
    return [records, slots, grad, int32([0, ROWS]), offsets, lookups, coefficients(0.1)]


def scatter(records: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    half = ROWS // 2
    torch.ops.rec_sdk.scatter_rows(records, slots[:half], grad[:half].view(torch.uint8))
    return records


def step(records: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    *segments, row = rest
    args = (slots, *segments, None, None, row, "sgd", DIM, torch.float32)
    torch.ops.rec_sdk.update_rows(records, grad, *args)
    return records


@pytest.fixture
def npu(device: torch.device) -> torch.device:
    if device.type != "npu":
        pytest.skip("about torch_npu's streams and devices")
    return device


Gate = Callable[["torch.npu.Stream"], Callable[[], object]]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """gate(stream) holds back what the stream is given from now on, until what it returns is called."""
    libc = ctypes.CDLL(None)
    made = []

    def close(stream: torch.npu.Stream) -> Callable[[], object]:
        semaphore = ctypes.create_string_buffer(64)
        libc.sem_init(semaphore, 0, 0)
        launch = ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc
        assert launch(ctypes.c_void_p(stream.npu_stream), libc.sem_wait, semaphore) == 0
        made.append(semaphore)
        return lambda: libc.sem_post(semaphore)

    yield close
    for semaphore in made:  # a test that failed leaves no stream waiting
        libc.sem_post(semaphore)


@pytest.mark.parametrize("where", ["a stream of its own", "another device"])
@pytest.mark.parametrize("operator", [scatter, step])
def test_waits_for_what_comes_before_it(
    operator: Callable[..., torch.Tensor], where: str, npu: torch.device, gate: Gate
) -> None:
    """On the current stream of its operands' device: records that arrive there late are those it takes."""
    other = where == "another device"
    if other and torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    there = torch.device("npu", 1 - (npu.index or 0)) if other else npu
    given = operands()
    on_device = [x.to(there) for x in given]
    late = given[0].pin_memory()
    on_device[0].zero_()
    torch.npu.synchronize(there)
    stream = torch.npu.current_stream(there) if other else torch.npu.Stream(there)
    open_gate = gate(stream)
    # The other device's stream is its current one although the device is not.
    with nullcontext() if other else torch.npu.stream(stream):
        on_device[0].copy_(late, non_blocking=True)
        found = operator(*on_device)
    torch.npu.default_stream(npu).synchronize()
    open_gate()
    stream.synchronize()
    assert torch.equal(found.cpu(), operator(*given))


def test_a_workspace_is_nobody_elses_while_it_is_used(npu: torch.device, gate: Gate) -> None:
    given = operands()
    on_device = [x.to(npu) for x in given]
    stream = torch.npu.Stream(npu)
    torch.npu.synchronize(npu)
    open_gate = gate(stream)
    with torch.npu.stream(stream):
        step(*on_device)
    taken = [torch.zeros(512, dtype=torch.uint8, device=npu) for _ in range(6000)]  # what the allocator has left
    torch.npu.default_stream(npu).synchronize()
    open_gate()
    stream.synchronize()
    assert not torch.cat(taken).any()
    assert torch.equal(on_device[0].cpu(), step(*given))
