"""Degenerate operands and mismatched devices cause an error or an empty result."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import forked_python
import pytest
import torch
from op_batches import Arguments, good_calls, int32

from rec_sdk_torch.operators import calls
from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.default import KERNELS
from rec_sdk_torch.operators.devices import backends

ELSEWHERE = "must be on the device of the first argument"


NAMES = list(good_calls("cpu"))


def test_every_operator_has_a_good_call() -> None:
    assert set(NAMES) == set(KERNELS)


def to_other_device(value: Any, device: str, every: bool = False) -> Any:
    if isinstance(value, list):  # of several tensors only the last moves, unless all are to move
        return [g.to(device) if every or g is value[-1] else g for g in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def mixes(name: str, device: torch.device, other: str) -> Iterator[tuple[str, Callable[..., object], Arguments]]:
    """Yields calls with one tensor on another device, and calls with all tensors but one on the other device."""
    operator, arguments = good_calls(device)[name]
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor | list)]
    for one in tensors:
        yield one, operator, arguments | {one: to_other_device(arguments[one], other)}
        yield one, operator, {k: v if k == one else to_other_device(v, other) for k, v in arguments.items()}


@pytest.mark.parametrize("name", NAMES)
def test_good_calls(name: str, device: torch.device) -> None:
    operator, arguments = good_calls(device)[name]
    operator(**arguments)
    operator(**{key: to_other_device(value, "meta", every=True) for key, value in arguments.items()})


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: torch.device) -> None:
    """torch's opcheck runs with every argument, without optional arguments, and with 16-bit weights."""
    operator, every = good_calls(device)[name]
    overload: Any = getattr(operator, "default", operator)
    optional = every.keys() & {"grad_column", "scale", "per_sample_weights"}
    given_calls = [every, every | dict.fromkeys(optional)] if optional else [every]
    given_calls += [every | {"weights": every["weights"].half()}] if "weights" in every else []
    for given in given_calls:
        ordered = [each.name for each in overload._schema.arguments if each.name in given and not each.kwarg_only]
        by_name = {key: given[key] for key in given.keys() - ordered}
        torch.library.opcheck(overload, tuple(given[key] for key in ordered), by_name)


@pytest.mark.parametrize("other", ["meta", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_mixed_devices_are_refused(name: str, other: str, device: torch.device) -> None:
    if other == device.type:
        pytest.skip("the same device")
    for tensor, operator, arguments in mixes(name, device, other):
        with pytest.raises(RuntimeError, match=ELSEWHERE):
            print(f"{name}, {tensor} alone on one device:", operator(**arguments))


@pytest.mark.parametrize("name", NAMES)
def test_a_device_without_a_backend(
    name: str, device: torch.device, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pytestconfig.getoption("--operators") != "default":
        pytest.skip("this one's kernels are known")
    monkeypatch.delitem(backends._BACKENDS, device.type)
    monkeypatch.setattr(calls, "_loaded", set())
    operator, arguments = good_calls(device)[name]
    operator(**arguments)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_tensors_are_refused(name: str) -> None:
    operator, arguments = good_calls("cpu")[name]
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=rf"rec_sdk::{name} takes strided tensors.*torch.sparse_coo"):
            operator(**{key: sparse(value) for key, value in arguments.items()})


def sparse(value: object) -> object:
    return value.to_sparse() if isinstance(value, torch.Tensor) else value


def test_records_of_no_bytes(device: torch.device) -> None:
    cache, slots = torch.zeros(5, 0, dtype=torch.uint8, device=device), int32([1, 4], device)
    assert ops.gather_rows(cache, slots).shape == (2, 0)
    ops.gather_rows.out(cache, slots, out=torch.zeros(2, 0, dtype=torch.uint8, device=device))
    ops.scatter_rows(cache, slots, torch.zeros(2, 0, dtype=torch.uint8, device=device))
    rows = torch.zeros(2, 0, dtype=torch.uint8, device=device)
    ops.swap_rows(cache, slots, int32([-1, 0], device), rows, rows[:1])


@pytest.mark.parametrize("dim", [2**30 + 1, 2**60, 2**62, 2**62 + 4, 2**63 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_dims_whose_products_overflow(optimizer: str, dtype: torch.dtype, dim: int, device: torch.device) -> None:
    operator, arguments = good_calls(device)["update_rows"]
    for width in (0, 16, 32):  # values that a product may have after an integer overflow
        cache = torch.zeros(5, width, dtype=torch.uint8, device=device)
        given = {"cache": cache, "optimizer": optimizer, "dim": dim, "weight_dtype": dtype}
        with pytest.raises(RuntimeError, match=rf"dim must be in \[1, {2**30}\], got {dim}"):
            operator(**arguments | given)


@pytest.mark.parametrize("dim", [2**30 + 1, 2**60, 2**61])
def test_wide_tables_without_rows(dim: int, device: torch.device) -> None:
    none = int32([], device)
    wide = torch.zeros(0, dim, device=device)
    calls = good_calls(device)
    with pytest.raises(RuntimeError, match="weights must have from 1 to 1073741824 columns"):
        ops.lookup_sequence(wide, none)
    empty: Arguments = {"weights": wide, "slots": none, "offsets": torch.zeros(3, dtype=torch.int64, device=device)}
    for name, extra in (("lookup_pooled", {"per_sample_weights": None}), ("pooled_weights_grad", {})):
        operator, arguments = calls[name]
        with pytest.raises(RuntimeError, match="weights must have from 1 to 1073741824 columns"):
            operator(**arguments | empty | extra)
    with pytest.raises(RuntimeError, match="pending must have at most 2147483648 columns"):
        ops.accumulate_rows(
            torch.zeros(0, 2 * dim, device=device), [wide], none, int32([0], device), none, None, None, None
        )


def test_bags_whose_number_overflows(device: torch.device) -> None:
    operator, arguments = good_calls(device)["lookup_pooled"]
    four = {
        "columns": torch.zeros(4, dtype=torch.int64, device=device),
        "mean": torch.zeros(4, dtype=torch.bool, device=device),
    }
    with pytest.raises(RuntimeError, match=f"4 feature.s. with a batch of {2**62} are too many bags"):
        operator(**arguments | four | {"out": torch.zeros(2**62, 0, device=device)})
    with pytest.raises(RuntimeError, match=rf"bags {2**63 - 1} to {2**63 - 1} \+ 2 exceed the 2 bags"):
        operator(**arguments | {"first_bag": 2**63 - 1})


def test_strides_of_single_rows_do_not_matter(device: torch.device) -> None:
    weights = torch.empty_strided((1, 8), (2**62, 1), device=device).fill_(3)
    assert torch.equal(ops.lookup_sequence(weights, int32([0, 0], device)), torch.full((2, 8), 3.0, device=device))


@pytest.mark.contents
@pytest.mark.parametrize("seed", range(4))
def test_random_arguments_raise_or_pass(seed: int, pytestconfig: pytest.Config) -> None:
    """The calls run in a separate process, which must end normally whatever the arguments are."""
    program = f"import test_edges; test_edges.fuzz({seed}, 400); print('through')"
    if pytestconfig.getoption("--operators") == "default":
        program = f"import default_operators; default_operators.stand_in('cpu'); {program}"
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, os.path.dirname(folder), os.environ.get("PYTHONPATH", "")])
    finished = forked_python.python("-c", program, PYTHONPATH=path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "through"


def random_tensor(choose: random.Random, like: torch.Tensor) -> torch.Tensor:
    """Draws a tensor of another shape, dtype or contents."""
    kind = choose.randrange(5)
    if kind == 0:
        return like.to(choose.choice([torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float16]))
    if kind == 1:
        sizes = [choose.choice([0, 0, 1, 2, 3, 5, 8, 33]) for _ in range(choose.choice([0, 1, like.dim(), 2, 3]))]
        return torch.ones(sizes, dtype=like.dtype)
    if kind == 2:
        wide = [choose.choice([0, 2**31, 2**40, 2**61, 2**62]) for _ in range(like.dim())]
        wide[choose.randrange(len(wide))] = 0
        return torch.empty(0, dtype=like.dtype).as_strided(wide, [1] * len(wide))
    if kind == 3 and like.dtype in (torch.int32, torch.int64) and like.numel():
        values = like.clone()
        values.view(-1)[choose.randrange(values.numel())] = choose.choice([-1, 0, 7, 2**31 - 1, -(2**31)])
        return values
    return like.as_strided([min(n, 1) for n in like.shape], [choose.choice([0, 1, 2**61]) for _ in like.shape])


def fuzz(seed: int, rounds: int) -> None:
    choose = random.Random(seed)
    for _ in range(rounds):
        operator, arguments = good_calls("cpu")[choose.choice(NAMES)]
        for key in choose.sample(sorted(arguments), choose.choice([1, 1, 2])):
            value = arguments[key]
            if isinstance(value, torch.Tensor):
                arguments[key] = random_tensor(choose, value)
            elif isinstance(value, list):
                arguments[key] = [random_tensor(choose, each) for each in value[: choose.randrange(3)]]
            elif isinstance(value, int):
                arguments[key] = choose.choice([0, -1, 1, 2**31, 2**62, 2**63 - 1, -(2**63)])
        with contextlib.suppress(RuntimeError, ValueError):
            operator(**arguments)
