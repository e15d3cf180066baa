"""Operators with a launch that fails on the EMULATED NPU; test_launches.py runs this program.

Each operator runs in a separate process, since torch_npu's task queue stops at the first error.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch
from torch import Tensor

from rec_sdk_torch import emulate, ops
from rec_sdk_torch.operators.devices.backends import parse_device
from rec_sdk_torch.operators.schemas import COEFFICIENTS

DIM, ROWS = 64, 10
WEIGHTS = torch.arange(1000 * DIM, dtype=torch.float32).reshape(1000, DIM)


def lookup(device: str) -> Tensor:
    slots = torch.arange(5000, dtype=torch.int32) * 7 % 1000
    return torch.ops.rec_sdk.lookup_sequence(WEIGHTS.to(device), slots.to(device))


def update(cache: Tensor) -> None:
    """Runs SGD on ROWS rows with 1,000 lookups each, which takes two launches on an NPU."""
    lookups = torch.arange(ROWS * 1000, dtype=torch.int32)
    borders = np.arange(0, len(lookups) + 1, 1000, dtype=np.int32)

    def there(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(cache.device)

    grads = [torch.ones(len(lookups), DIM).to(cache.device)]
    coefficients = torch.zeros(1, COEFFICIENTS)
    coefficients[0, :2] = torch.tensor([float("inf"), 0.5])
    torch.ops.rec_sdk.update_rows(
        cache,
        grads,
        there(range(ROWS)),
        there([0, ROWS]),
        there(borders),
        there(lookups),
        None,
        None,
        None,
        coefficients.to(cache.device),
        "sgd",
        DIM,
        torch.float32,
        hot_segments=there(ops.hot_segments(borders)),
    )


class CopyRows(ctypes.Structure):
    """The arguments of a copy, as in op_kernels/common/arguments.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cache", "rows", "slots")),
        *((name, ctypes.c_int64) for name in ("bytes", "cache_slots", "count")),
    )


def gather(kernels: ctypes.CDLL) -> None:
    """Launches a kernel on torch_npu's current stream, but not through torch_npu's operators."""
    cache, rows, slots = (
        torch.zeros(64, dtype=dtype, device="npu") for dtype in (torch.uint8, torch.uint8, torch.int32)
    )
    arguments = CopyRows(cache.data_ptr(), rows.data_ptr(), slots.data_ptr(), 64, 1, 1)
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    kernels.rec_sdk_launch_gather_rows(stream, ctypes.byref(arguments))


def main() -> None:
    """Prints the error of a failing launch, and the kernels that ran.

    The failing launch is the `after`-th of a lookup or an update, or a launch by other code before a lookup.
    """
    operator, after = sys.argv[1], int(sys.argv[2])
    parse_device("npu")  # loads its operators
    runtime = ctypes.CDLL(str(emulate.library_directory() / "libascendcl.so"))
    kernels = ctypes.CDLL(str(emulate.library_directory() / "librec_sdk_ascendc.so"))
    kernels.rec_sdk_emulator_counters.restype = ctypes.c_char_p
    cache = WEIGHTS.view(torch.uint8).to("npu")
    run = {
        "lookup": lambda: lookup("npu"),
        "update": lambda: update(cache),
        "other, lookup": lambda: (gather(kernels), lookup("npu")),
    }[operator]
    torch.npu.synchronize()
    runtime.rec_sdk_emulator_refuse_launch(ctypes.c_int64(after))
    try:
        run()
        torch.npu.synchronize()
    except RuntimeError as error:
        print(error)
    runtime.aclrtSynchronizeDevice()  # torch_npu may not, after an error
    print("ran:", kernels.rec_sdk_emulator_counters().decode())


if __name__ == "__main__":
    main()
