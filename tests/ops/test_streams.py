"""The stream and device on which an operator runs, and the memory that it uses while it runs.

Results are compared with the CPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from op_batches import coefficients, int32

import rec_sdk_torch.ops  # noqa: F401

ROWS, LOOKUPS, DIM = 20, 5000, 8  # every row has enough lookups to need a workspace
EACH = 50  # rows of each gradient, if there are several


def operands() -> list[torch.Tensor]:
    """Returns records, slots, gradients, the other arguments of update_rows, and rows and sources of several
    gradients.
    """
    generator = torch.Generator().manual_seed(0)
    records = torch.randn(ROWS, DIM, generator=generator).view(torch.uint8)
    slots = int32(torch.randperm(ROWS, generator=generator))
    grad = torch.randn(LOOKUPS, DIM, generator=generator)
    offsets = int32(torch.arange(0, LOOKUPS + 1, LOOKUPS // ROWS))
    lookups = int32(torch.randperm(LOOKUPS, generator=generator))
    several = [lookups % EACH, lookups // EACH]
    return [records, slots, grad, int32([0, ROWS]), offsets, lookups, coefficients(0.1), *several]


def scatter(records: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    half = ROWS // 2
    torch.ops.rec_sdk.scatter_rows(records, slots[:half], grad[:half].view(torch.uint8))
    return records


def step_of_several(
    records: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Runs a step with 100 gradients, whose list is freed before the kernels run."""
    tables, offsets, _, rates, rows, sources = rest
    args = (slots, tables, offsets, rows, sources, None, None, rates, "sgd", DIM, torch.float32)
    torch.ops.rec_sdk.update_rows(records, list(grad.split(EACH)), *args)
    return records


def step(records: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    *segments, row = rest[:4]
    args = (slots, *segments, None, None, None, row, "sgd", DIM, torch.float32)
    torch.ops.rec_sdk.update_rows(records, [grad], *args)
    return records


@pytest.fixture
def accelerator(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("about a device's streams")
    for operator in (scatter, step, step_of_several):  # CUDA loads a kernel at its first launch, which may block
        operator(*[x.to(device) for x in operands()])
    return device


Gate = Callable[[torch.Stream], Callable[[], object]]


def npu_gate(made: list[ctypes.Array[ctypes.c_char]]) -> Gate:
    """Returns a gate of semaphores, which are added to `made`."""
    libc = ctypes.CDLL(None)

    def close(stream: torch.Stream) -> Callable[[], object]:
        semaphore = ctypes.create_string_buffer(64)
        libc.sem_init(semaphore, 0, 0)
        launch = ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc
        assert launch(ctypes.c_void_p(stream.npu_stream), libc.sem_wait, semaphore) == 0
        made.append(semaphore)
        return lambda: libc.sem_post(semaphore)

    return close


def cuda_gate(stream: torch.Stream) -> Callable[[], object]:
    """Blocks the stream for half a second; opens by itself, so that the test ends even if CUDA waits for the stream."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # number of cycles, about half a second
    return lambda: None


@pytest.fixture
def gate(pytestconfig: pytest.Config, accelerator: torch.device) -> Iterator[Gate]:
    """Returns a function that blocks a stream's later work until the function that it returns is called."""
    if pytestconfig.getoption("--operators") == "default":
        pytest.skip("those in plain torch wait for the device")
    if accelerator.type not in ("cuda", "npu"):
        pytest.skip(f"nothing here holds a stream of {accelerator.type!r} back")
    made: list[ctypes.Array[ctypes.c_char]] = []
    yield cuda_gate if accelerator.type == "cuda" else npu_gate(made)
    for semaphore in made:  # a failed test must not leave a stream blocked
        ctypes.CDLL(None).sem_post(semaphore)


@pytest.mark.parametrize("where", ["a stream of its own", "another device"])
@pytest.mark.parametrize("operator", [scatter, step, step_of_several])
def test_an_operator_waits_for_earlier_work_on_its_stream(
    operator: Callable[..., torch.Tensor], where: str, accelerator: torch.device, gate: Gate
) -> None:
    """The operator runs on the current stream of its operands' device, and reads records that arrive there late."""
    module = torch.get_device_module(accelerator)
    current, other = accelerator, where == "another device"
    if other and module.device_count() < 2:
        pytest.skip("needs two devices")
    if other:
        accelerator = torch.device(current.type, 1 - (current.index or 0))
    given = operands()
    on_device = [x.to(accelerator) for x in given]
    late = given[0].pin_memory()
    on_device[0].zero_()
    module.synchronize(accelerator)
    stream = module.current_stream(accelerator) if other else module.Stream(accelerator)
    open_gate = gate(stream)
    # The stream is the other device's current one although that device is not current.
    with nullcontext() if other else module.stream(stream):
        on_device[0].copy_(late, non_blocking=True)
        found = operator(*on_device)
    module.default_stream(current).synchronize()
    open_gate()
    stream.synchronize()
    assert torch.equal(found.cpu(), operator(*given))


def test_a_workspace_is_not_reused_while_in_use(accelerator: torch.device, gate: Gate) -> None:
    module = torch.get_device_module(accelerator)
    given = operands()
    on_device = [x.to(accelerator) for x in given]
    stream = module.Stream(accelerator)
    module.synchronize(accelerator)
    open_gate = gate(stream)
    with module.stream(stream):
        step(*on_device)
    # memory that the allocator has left
    taken = [torch.zeros(512, dtype=torch.uint8, device=accelerator) for _ in range(6000)]
    module.default_stream(accelerator).synchronize()
    open_gate()
    stream.synchronize()
    assert not torch.cat(taken).any()
    assert torch.equal(on_device[0].cpu(), step(*given))


def test_pinned_rows(accelerator: torch.device) -> None:
    """CUDA's copies also read and write rows in pinned host memory."""
    if accelerator.type != "cuda":
        pytest.skip("only CUDA's copies reach host memory")
    records, slots, grad, *_ = operands()
    on_device, on_slots = records.to(accelerator), slots.to(accelerator)
    rows = torch.zeros_like(records).pin_memory()
    torch.ops.rec_sdk.gather_rows.out(on_device, on_slots, out=rows)
    torch.cuda.synchronize(accelerator)
    assert torch.equal(rows, records[slots.long()])
    fresh = grad[:ROWS].view(torch.uint8).pin_memory()
    torch.ops.rec_sdk.scatter_rows(on_device, on_slots, fresh)
    torch.ops.rec_sdk.scatter_rows(records, slots, fresh)
    assert torch.equal(on_device.cpu(), records)
