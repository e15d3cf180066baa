"""Kernels on every device are bit-identical to the default operators, which are written in plain torch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from op_batches import OPTIMIZERS, Arguments, default, good_calls, int32, make_bags, moved, random_bytes

from rec_sdk_torch.formulas import FORMULAS
from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.default import KERNELS
from rec_sdk_torch.operators.record import WEIGHT_DTYPES, RecordLayout
from rec_sdk_torch.operators.schemas import coefficient_names
from rec_sdk_torch.operators.segments import hot_segments
from rec_sdk_torch.tools.operator_cases import Batch, all_cases

DIMS = (1, 3, 20, 64, 130)
LENGTHS = (0, 1, 1, 2, 31, 32, 33, 97, 129, 400, 1025, 3111)


def test_every_operator_has_a_default() -> None:
    """Every operator that computes something has a default; `empty_output` is torch's own except on the CPU."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rec_sdk::"))
    assert sorted([*KERNELS, "empty_output"]) == sorted(name.removeprefix("rec_sdk::") for name in names)
    assert torch.ops.rec_sdk.empty_output(torch.empty(0, device="meta"), 3, 4).shape == (3, 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_formula_names_the_coefficients_of_its_kernel(optimizer: str) -> None:
    assert FORMULAS[optimizer].coefficients.split() == coefficient_names(optimizer)


def assert_same_bits(name: str, arguments: Arguments, device: torch.device) -> Arguments:
    """Compares the result and all written tensors with plain torch; returns plain torch's arguments after its call."""
    there = moved(arguments, device)
    found, expected = good_calls(device)[name][0](**there), default(name, **arguments)
    compared = {key: (there[key], arguments[key]) for key in arguments if isinstance(arguments[key], torch.Tensor)}
    if expected is not None:
        compared["result"] = found, expected
    for key, (ours, wanted) in compared.items():
        assert torch.equal(bits(ours.cpu()), bits(wanted)), f"{name}: other bits in {key}"
    return arguments


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, with one representation of NaN."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor).to(tensor.dtype)
    return tensor.contiguous().view(-1).view(torch.uint8)


def draw(name: str, limit: int, size: int, generator: torch.Generator) -> tuple[str, torch.Tensor]:
    return name, torch.randint(0, limit, (size,), generator=generator, dtype=torch.int32)


def sums(choose: random.Random, generator: torch.Generator, dim: int) -> Arguments:
    """Draws the arguments that update_rows and accumulate_rows share, with hot rows and gradients of many shapes."""
    lengths = [choose.choice(LENGTHS) for _ in range(choose.randint(1, 9))]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    count, extra = int(offsets[-1]), choose.choice([0, 3])
    grads = [
        torch.randn(choose.choice([1, 50]), dim + 4, generator=generator)[:, : dim + extra]
        for _ in range(choose.choice([1, 1, 3]))
    ]
    given: Arguments = {
        "grads": grads,
        "unique_slots": torch.randperm(12, generator=generator)[: len(lengths)].int(),
        "segment_offsets": torch.from_numpy(offsets),
        "grad_source": None,
        "grad_column": None,
        "scale": choose.choice([None, torch.randn(count, generator=generator)]),
        "hot_segments": choose.choice([None, torch.from_numpy(hot_segments(offsets))]),
    }
    rows = torch.tensor([len(grad) for grad in grads])
    source = torch.randint(0, len(grads), (count,), generator=generator)
    if len(grads) > 1 or choose.random() < 0.3:
        given["grad_source"] = source.int()
    if choose.random() < 0.5:
        given["grad_column"] = draw("", extra + 1, count, generator)[1]
    given["grad_row"] = (torch.rand(count, generator=generator) * rows[source]).int().minimum(rows[source].int() - 1)
    return given


def update(choose: random.Random, generator: torch.Generator, optimizer: str) -> tuple[Arguments, RecordLayout]:
    """Draws arguments of update_rows: records of all dtypes, and tables with different hyperparameters."""
    dim, weight_dtype = choose.choice(DIMS), choose.choice(WEIGHT_DTYPES)
    elements = FORMULAS[optimizer].state_elements(dim)
    codes = [choose.choice([0, 0, 1, 2]) for _ in elements] if choose.random() < 0.4 else []
    layout = RecordLayout(dim, weight_dtype, elements, tuple(WEIGHT_DTYPES[code] for code in codes))
    cache = random_bytes(12, layout.bytes)
    layout.weight(cache).copy_(torch.randn(12, dim, generator=generator))
    for index in range(len(elements)):
        state = torch.rand(12, elements[index], generator=generator) * choose.choice([1.0, 9.0])
        layout.state(cache, index).copy_(state.round() if choose.random() < 0.5 else state)
    given = sums(choose, generator, dim)
    rows = len(given["unique_slots"])
    cuts = sorted(choose.randint(0, rows) for _ in range(choose.choice([0, 1, 3])))
    tables = len(cuts) + 1
    coefficients = torch.rand(tables, 16, generator=generator) * choose.choice([1.0, 4.0])
    coefficients *= torch.where(torch.rand(tables, 16, generator=generator) < 0.15, -1, 1)
    coefficients *= torch.rand(tables, 16, generator=generator) > 0.1
    coefficients[:, 0] = choose.choice([0.5, float("inf")])
    random_rounding = choose.random() < 0.4
    row_ids = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (tables,), generator=generator)
    given |= {
        "cache": cache,
        "table_offsets": int32([0, *cuts, rows]),
        "coefficients": coefficients,
        "optimizer": optimizer,
        "dim": dim,
        "weight_dtype": weight_dtype,
        "row_ids": row_ids if random_rounding else None,
        "rounding_seeds": seeds if random_rounding else None,
        "state_dtypes": codes,
        "row_norms": torch.empty(2, rows) if choose.random() < 0.6 else None,
    }
    return given, layout


def parts(cache: torch.Tensor, layout: RecordLayout) -> list[torch.Tensor]:
    return [layout.weight(cache), *(layout.state(cache, i) for i in range(len(layout.state_elements)))]


def batches(config: pytest.Config, salt: int) -> list[tuple[random.Random, torch.Generator]]:
    """Returns a random generator for each batch; seeds depend on the day, and the full suite has more batches."""
    seeds = [hash((config.getoption("--day"), salt, i)) for i in range(60 if config.getoption("--full") else 6)]
    return [(random.Random(seed), torch.Generator().manual_seed(seed % 2**32)) for seed in seeds]


@pytest.mark.kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates(optimizer: str, device: torch.device, pytestconfig: pytest.Config) -> None:
    for choose, generator in batches(pytestconfig, OPTIMIZERS.index(optimizer)):
        arguments, layout = update(choose, generator, optimizer)
        there = moved(arguments, device)
        ops.update_rows(**there)
        default("update_rows", **arguments)
        if arguments["row_norms"] is not None:
            assert torch.equal(bits(there["row_norms"].cpu()), bits(arguments["row_norms"])), "other bits in the norms"
        found, expected = there["cache"].cpu(), arguments["cache"]
        for part, (ours, wanted) in enumerate(zip(parts(found, layout), parts(expected, layout), strict=True)):
            assert torch.equal(bits(ours), bits(wanted)), f"other bits in part {part}"
            ours.zero_()
            wanted.zero_()
        assert torch.equal(found, expected), "other bytes between the parts"


@pytest.mark.kernels
def test_accumulated_gradients(device: torch.device, pytestconfig: pytest.Config) -> None:
    for choose, generator in batches(pytestconfig, -1):
        dim = choose.choice(DIMS)
        pending = torch.randn(12, 2 * dim, generator=generator)
        assert_same_bits("accumulate_rows", {"pending": pending} | sums(choose, generator, dim), device)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_lookups(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(dim)
    lengths = torch.randint(0, 90, (150,), generator=generator).tolist()
    lengths[3] = 2500
    batch = make_bags(lengths, 50, dim, dtype)
    batch.weights[7, 0], batch.weights[8, 0] = torch.nan, torch.inf
    shared = {name: getattr(batch, name) for name in ("weights", "slots", "offsets", "columns", "mean")}
    assert_same_bits("lookup_sequence", {name: shared[name] for name in ("weights", "slots")}, device)
    for sample_weights, first in itertools.product((None, batch.sample_weights), (0, 60)):
        end = int(batch.offsets[-1 - first])
        given = {
            "slots": batch.slots[:end],
            "offsets": batch.offsets[: len(batch.offsets) - first],
            "per_sample_weights": None if sample_weights is None else sample_weights[:end],
            "first_bag": first,
            "out": batch.out.clone(),
        }
        assert_same_bits("lookup_pooled", shared | given, device)
    grad = torch.randn(batch.out.shape, generator=generator)
    assert_same_bits("pooled_weights_grad", shared | {"grad": grad}, device)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", DIMS)
def test_a_call_of_every_operator(dim: int, device: torch.device) -> None:
    for case in all_cases(Batch.random(200, 3000), dim, optimizers=["sgd"]):
        assert_same_bits(case.operator, case.to("cpu").arguments, device)


@pytest.mark.kernels
def test_row_copies_match_on_all_devices(device: torch.device) -> None:
    cache, slots = random_bytes(40, 48), int32(torch.randperm(40)[:20])
    rows, victim_indices = random_bytes(20, 48), int32([i // 2 if i % 2 else -1 for i in range(20)])
    assert_same_bits("gather_rows", {"cache": cache, "slots": slots}, device)
    assert_same_bits("gather_rows.out", {"cache": cache, "slots": slots, "out": random_bytes(20, 48)}, device)
    assert_same_bits("scatter_rows", {"cache": cache, "slots": slots, "rows": rows}, device)
    arguments = {
        "cache": cache,
        "slots": slots,
        "victim_indices": victim_indices,
        "rows": rows,
        "victims": random_bytes(10, 48),
    }
    assert_same_bits("swap_rows", arguments, device)
