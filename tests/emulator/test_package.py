"""Messages of this package on an (EMULATED) NPU when something is missing or wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

from rec_sdk_torch import emulate
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig

ROOT = Path(emulate.__file__).parents[1]


NO_CANN = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | {"PYTHONPATH": str(ROOT)}


def without_cann(code: str, **variables: str) -> str:
    """Runs code in a process that finds neither CANN nor the emulated NPU; returns its output."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    finished = subprocess.run(
        command, env=NO_CANN | variables, capture_output=True, text=True, timeout=180, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def follow_instructions(message: str, folder: Path) -> None:
    """Runs the command in a message, with a program of three lines."""
    command = message.rstrip().rpartition("on the emulated NPU: ")[2]
    (folder / "program.py").write_text("import torch\nprint(torch.ones(2, device='npu').sum().item())\n")
    finished = subprocess.run(
        command, shell=True, cwd=folder, env=NO_CANN, capture_output=True, text=True, timeout=180, check=False
    )
    assert finished.stdout.splitlines()[-1:] == ["2.0"], (command, finished.stderr)


def test_torch_npu_without_cann(tmp_path: Path) -> None:
    """With torch_npu but without CANN, `import torch` fails, so this package reports the cause."""
    code = """
import rec_sdk_torch
try:
    rec_sdk_torch.TableBatchedEmbedding
except ImportError as error:
    print(error)
"""
    printed = without_cann(code)
    assert "torch_npu is installed and does not load" in printed
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in printed
    follow_instructions(printed, tmp_path)


def test_device_npu_without_cann(tmp_path: Path) -> None:
    code = """
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
print(TableBatchedEmbedding([TableConfig("t", 10, 4)], device="cpu").device)
try:
    TableBatchedEmbedding([TableConfig("t", 10, 4)], device="npu")
except ImportError as error:
    print(error)
"""
    device, error = without_cann(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert device == "cpu"
    assert "device 'npu': torch_npu does not load" in error
    assert "CANN" in error
    follow_instructions(error, tmp_path)


BAD_SLOT = """
import torch
from rec_sdk_torch.operators.devices.backends import parse_device
from rec_sdk_torch.operators.calls import ops
device = parse_device("npu")
weights, slots = torch.ones(4, 8, device=device), torch.tensor([1, {slot}], dtype=torch.int32, device=device)
try:
    print({call})
    torch.npu.synchronize()
except RuntimeError as error:
    print("refused", str(error).splitlines()[-1])
"""


@pytest.mark.parametrize(
    ("kernel", "slot", "engine", "call"),
    [
        ("lookup_sequence", 4, "MTE2", "ops.lookup_sequence(weights, slots).shape"),
        ("gather_rows", -(2**31), "MTE2", "ops.gather_rows(weights.view(torch.uint8), slots).shape"),
        (
            "scatter_rows",
            -1,
            "MTE3",
            "ops.scatter_rows(weights.view(torch.uint8), slots, weights.view(torch.uint8)[:2])",
        ),
    ],
)
def test_a_slot_out_of_range_stops_the_run(kernel: str, slot: int, engine: str, call: str) -> None:
    """Slots are not checked before the launch, so the kernel accesses memory beyond the cache and fails."""
    finished = forked_python.python("-c", BAD_SLOT.format(slot=slot, call=call))
    refused = finished.stdout.splitlines()[-1]
    assert refused.startswith("refused"), finished.stdout + finished.stderr
    for part in (f"kernel '{kernel}'", "core 0 of 1", engine, "DataCopyPad", "in no buffer of this launch"):
        assert part in refused


def test_host_code_that_reads_device_memory_ends_the_run() -> None:
    code = "import ctypes, torch; ctypes.string_at(torch.ones(4, device='npu').data_ptr(), 4)"
    finished = forked_python.python("-c", code)
    assert finished.returncode == -signal.SIGSEGV
    assert "host code touched device memory" in finished.stderr


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'npu:7': there are 2 NPUs, 0 to 1"):
        TableBatchedEmbedding([TableConfig("t", 10, 4)], device="npu:7")


def test_a_backward_on_one_device_with_tables_on_another() -> None:
    """torch_npu's autograd would crash if another device was selected before any memory was allocated on it."""
    code = """
import torch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
TableBatchedEmbedding([TableConfig("t", 10, 4)], device="npu:1").cache_sizes
x = torch.ones(2, device="npu:0", requires_grad=True)
x.sum().backward()
print(x.grad.tolist())
"""
    finished = forked_python.python("-c", code)
    assert finished.stdout.splitlines()[-1] == "[1.0, 1.0]", finished.stderr
