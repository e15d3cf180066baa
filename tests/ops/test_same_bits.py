"""Results are bit-identical for the same inputs: sums follow the documented order with any threads and instruction set.

`test_default_operators.py` covers other devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from op_batches import (
    OPTIMIZERS,
    Cache,
    accumulate,
    coefficients,
    int32,
    make_bags,
    segments_of,
    states_of,
    update,
)
from threads import threads

from rec_sdk_torch import ops
from rec_sdk_torch.tools.operator_cases import Batch, all_cases

BLOCK = 32


def reference_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sums blocks of 32 in order, then combines the block sums like a binary counter, each time left + right."""
    stack: list[torch.Tensor] = []
    for i, block in enumerate(terms.split(BLOCK)):
        total = block[0]
        for term in block[1:]:
            total = total + term
        stack.append(total)
        carry = i
        while carry & 1:
            right = stack.pop()
            stack[-1] = stack[-1] + right
            carry >>= 1
    while len(stack) > 1:
        right = stack.pop()
        stack[-1] = stack[-1] + right
    return stack[0]


@contextlib.contextmanager
def isa(name: str) -> Iterator[None]:
    ops.select_cpu_isa(name)
    try:
        yield
    finally:
        ops.select_cpu_isa()


def available_isas() -> list[str]:
    found = []
    for name in ("baseline", "x86_64_v3", "x86_64_v4"):
        with contextlib.suppress(ValueError), isa(name):
            found.append(ops.cpu_isa())
    return found


@pytest.mark.parametrize("dim", [5, 64, 130])
@pytest.mark.parametrize("hits", [1, 2, 31, 32, 33, 64, 97, 1023, 1024, 1025, 2048, 2049, 3111, 5000])
def test_documented_order(hits: int, dim: int, device: torch.device) -> None:
    grad = torch.randn(hits, dim, generator=torch.Generator().manual_seed(hits)) * 100
    cache = Cache(torch.zeros(3, dim), device=device)
    slots = torch.full((hits,), 2, device=device)
    update(cache, grad.to(device), slots, "sgd", coefficients(-1.0, device=device))
    assert torch.equal(cache.weights[2].cpu(), reference_sum(grad))


def run_everything(dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Returns the bytes that every operator writes, for a batch with hot rows (segments of several chunks)."""
    generator = torch.Generator().manual_seed(dim)
    lookups, rows = 12_000, 500
    slots = (torch.rand(lookups, generator=generator) ** 6 * rows).long().to(device)
    grad = torch.randn(lookups, dim, generator=generator).to(device)
    scale = torch.rand(lookups, generator=generator).to(device)
    weights = torch.randn(rows, dim, generator=generator).to(device)
    results = []
    row = coefficients(0.1, 1e-8, 0.9, 0.1, 0.75, 0.25, 1.25, max_gradient=9.0, device=device)
    for number, optimizer in enumerate(OPTIMIZERS):
        states = [torch.ones(rows, n, device=device) for n in states_of(optimizer, dim)]
        cache = Cache(weights, states, dtype, device)
        update(cache, grad, slots, optimizer, row, scale if number % 2 else None)
        results.append(cache.records.clone())
    every = all_cases(Batch.from_lookups(slots.cpu().numpy(), rows), dim, optimizers=())
    results += [result for case in every for result in case.to(device).results().values()]
    results.append(torch.ops.rec_sdk.gather_rows(cache.records, int32(slots, device)))
    order = int32(torch.randperm(rows, generator=generator), device)
    torch.ops.rec_sdk.scatter_rows(cache.records, order, cache.records.clone())
    results.append(cache.records.clone())
    victims = torch.empty_like(cache.records)
    victim_indices = torch.arange(rows, dtype=torch.int32, device=device)
    torch.ops.rec_sdk.swap_rows(cache.records, order, victim_indices, cache.records.flip(0), victims)
    results += [cache.records, victims]
    pending = torch.zeros(rows, 2 * dim, device=device)
    for _ in range(2):
        accumulate(pending, [grad], **segments_of(slots, scale))
    results.append(pending)
    lengths = torch.randint(0, 90, (300,), generator=generator).tolist()
    bags = make_bags(lengths, 100, dim, dtype, device)
    results.append(bags.lookup(bags.sample_weights, 0, bags.out.clone()))
    results.append(bags.weights_grad(torch.randn(bags.out.shape, generator=generator).to(device)))
    return [r.contiguous().view(torch.uint8).cpu() for r in results]


# the first result is the reference
CONFIGURATIONS = [(name, count) for name in available_isas() for count in (1, 5)][1:]
DIMS = (1, 3, 20, 64, 130)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Selects all pairs in the full suite; otherwise every width with one dtype, which depends on the day."""
    if metafunc.function is test_threads_and_instruction_sets:
        full, day = (metafunc.config.getoption(name) for name in ("--full", "--day"))
        pairs = [(i, j) for i in range(len(DIMS)) for j in range(len(DTYPES)) if full or (i + j + day) % 3 == 0]
        metafunc.parametrize(("dim", "dtype"), [(DIMS[i], DTYPES[j]) for i, j in pairs])


@pytest.mark.kernels
def test_threads_and_instruction_sets(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("about the CPU's kernels alone")
    with isa("baseline"), threads(1):
        expected = run_everything(dim, dtype)
    for name, count in CONFIGURATIONS:
        with isa(name), threads(count):
            for i, (found, wanted) in enumerate(zip(run_everything(dim, dtype), expected, strict=True)):
                assert torch.equal(found, wanted), f"result {i} differs with {name}, {count} thread(s)"


def test_isa_selection() -> None:
    assert "baseline" in available_isas()
    with pytest.raises(ValueError, match="no CPU kernels for 'no_such'"):
        ops.select_cpu_isa("no_such")
