"""A device without kernels of this package: its default operators, their warning, and the operator tests on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
import torch

from rec_sdk_torch.operators.devices.backends import backend_for

TESTS = Path(__file__).parent
LONG = {"test_default_operators.py", "test_extremes.py", "test_same_bits.py", "test_streams.py", "test_update_rows.py"}
"""Test files that only the full suite runs on the new device."""


def test_the_suite_passes_without_a_kernel(pytestconfig: pytest.Config) -> None:
    """The operator tests pass on a new backend that has no kernel yet; contents of index tensors are checked as
    well.
    """
    full = pytestconfig.getoption("--full")
    files = sorted(path for path in (TESTS / "ops").glob("test_*.py") if full or path.name not in LONG)
    options = ["--day", str(pytestconfig.getoption("--day"))]
    options += (
        ["--full"] if full else ["-k", "not random_arguments and not many_hits"]
    )  # tests that start processes or take long
    command = [sys.executable, "-m", "pytest", *map(str, files), "--operators", "default", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "operators: default" in done.stdout


PROGRAM = """
import warnings
import torch
import default_operators
from rec_sdk_torch.operators.calls import ops

default_operators.stand_in("cpu")
weights, slots = torch.randn(3, 4), torch.tensor([2, 0], dtype=torch.int32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        found = ops.lookup_sequence(weights, slots)
        rows = ops.gather_rows(weights.view(torch.uint8), slots)
assert torch.equal(found, weights[[2, 0]])
for warning in caught:
    print(warning.filename == "<string>", warning.message)
"""


def python(program: str) -> str:
    """Runs a program in a separate process; returns its output."""
    done = forked_python.python(
        "-c", program, PYTHONPATH=os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_warning_for_an_operator() -> None:
    """Each operator warns once, and the warning points to the caller's line."""
    lines = python(PROGRAM).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["True rec_sdk::lookup_sequence", "True rec_sdk::gather_rows"]
    assert all("no kernel of it for device 'cpu'" in line and "slow" in line for line in lines)


TENSORS = """
import torch
from rec_sdk_torch.operators.calls import ops

slots = torch.tensor([1, 0], dtype=torch.int32)
with torch.inference_mode():
    inside = torch.zeros(2, 8, dtype=torch.uint8)
ops.scatter_rows(inside, slots, torch.ones(2, 8, dtype=torch.uint8))
print(inside, inside.is_inference())

pending, one = torch.zeros(2, 8, requires_grad=True), torch.ones(2, 4, requires_grad=True)
offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
ops.accumulate_rows(pending, [one], slots, offsets, slots, None, None, None)
print(pending, pending.is_leaf, pending._version)
found = ops.lookup_sequence(one, slots)
print(found.detach(), found.requires_grad)
for bad in (slots.long(), slots.to_sparse()):
    try:
        ops.lookup_sequence(one, bad)
    except RuntimeError as error:
        print(type(error), str(error).partition("\\n")[0], (one * 2).requires_grad)
"""


def test_tensors_that_a_kernel_accepts() -> None:
    """Tensors that require gradients and inference tensors are written without autograd; invalid tensors are
    refused.
    """
    of_kernels = python(TENSORS)
    assert "takes strided tensors" in of_kernels
    assert python("import default_operators; default_operators.stand_in('cpu')" + TENSORS) == of_kernels


def test_tables_say_what_they_need() -> None:
    with pytest.raises(
        NotImplementedError, match=r"'lazy': tables are supported on \['cpu', .*operators .* run, slowly"
    ):
        backend_for(torch.device("lazy"))
